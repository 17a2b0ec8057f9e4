"""What moving work between tensor-parallel ranks costs."""

from __future__ import annotations

from dataclasses import dataclass

_FORWARD = 1 / 3
"""The forward pass's part of a step's computation."""


@dataclass(frozen=True, kw_only=True)
class MigrationCost:
    """Seconds to move a fraction of all work: fixed + slope * fraction."""

    fixed: float
    slope: float

    def __call__(self, part: float) -> float:
        return self.fixed + self.slope * part if part > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class LeaseCost:
    """Seconds by which a lease of a fraction of all work lengthens a step.

    Weights travel after the optimizer step, while the forward pass computes; gradients while the backward pass
    does. The first block waits for the first message, and nothing is left to compute when the gradients of the last
    block travel. The rest is hidden as far as there is computation to hide it, but for the part `exposed`.
    """

    fixed: float
    one_way: float
    """Seconds to send the weights of all work once."""

    messages: int = 1
    """Messages of weights."""

    blocks: int = 1
    """Messages of gradients."""

    exposed: float = 1.0
    ratio: float = 1.0
    """Measured over predicted cost of earlier leases."""

    def __call__(self, part: float, step: float) -> float:
        """Of a step that takes so many seconds without it."""
        if part <= 0:
            return 0.0
        seconds = self.one_way * part
        out = self._not_hidden(seconds, self.messages, step * _FORWARD)
        back = self._not_hidden(seconds, self.blocks, step * (1 - _FORWARD))
        return self.ratio * (self.fixed + out + back)

    def _not_hidden(self, seconds: float, messages: int, computation: float) -> float:
        alone = seconds / messages
        behind = seconds - alone
        return alone + max(self.exposed * behind, behind - computation)


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

    def lease(self, work_bytes: float, blocks: int, messages: int) -> LeaseCost:
        """The cost of sending weights out, in a few messages, and gradients back, block by block, in every step."""
        messages = min(messages, blocks)
        return LeaseCost(
            fixed=self.fixed * (2 + self.exposed * (messages + blocks - 2)),
            one_way=self.per_byte * work_bytes,
            messages=messages,
            blocks=blocks,
            exposed=self.exposed,
        )
