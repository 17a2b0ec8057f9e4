"""The time of a tensor-parallel rank as a function of its share of the units: the project's one formula for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShareTime:
    """Seconds of a rank: fixed + whole * share, where a share is a part of all units, or a number of them.

    Assumes that all units of a block take the same time, and that leaving out a part of them saves that part.
    """

    fixed: float
    """What does not depend on the share: replicated operators, the optimizer of replicated parameters."""

    whole: float
    """All units on this rank; infinite for a rank that must have none."""

    @classmethod
    def measured(cls, units_s: float, rest_s: float, share: float, pruned: float = 0.0) -> ShareTime:
        """Of a rank that spent `units_s` in its share of the units, of which it left out the part `pruned`."""
        return cls(rest_s, units_s / (share * (1 - pruned)))

    def seconds(self, share: float, pruned: float = 0.0) -> float:
        return self.fixed + (self.whole * share * (1 - pruned) if share else 0.0)

    def share_within(self, seconds: float) -> float:
        """The share that takes so long; 0 if even none takes longer."""
        return max(0.0, seconds - self.fixed) / self.whole
