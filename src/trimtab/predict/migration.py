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
