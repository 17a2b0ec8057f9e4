"""What moving work between tensor-parallel ranks costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MigrationCost:
    """Seconds to move a fraction of all work: fixed + slope * fraction."""

    fixed: float
    slope: float

    def __call__(self, part: float) -> float:
        return self.fixed + self.slope * part if part > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Seconds of one all-to-all in which one rank's slices go to the others: fixed + per_byte * bytes."""

    fixed: float
    per_byte: float
    exposed: float
    """The fraction of it that concurrent matrix products do not hide: 0 if all is hidden, 1 if nothing is."""

    def own(self, work_bytes: float, copies: int, blocks: int) -> MigrationCost:
        """The cost of moving parameters and optimizer state permanently: one all-to-all per block."""
        return MigrationCost(fixed=self.fixed * blocks, slope=self.per_byte * work_bytes * copies)

    def lease(self, work_bytes: float, blocks: int, messages: int) -> MigrationCost:
        """The cost of sending weights out, in a few messages, and gradients back, block by block, in every step."""
        return MigrationCost(
            fixed=self.exposed * self.fixed * (min(messages, blocks) + blocks),
            slope=self.exposed * self.per_byte * work_bytes * 2,
        )
