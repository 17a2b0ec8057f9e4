"""Detects that a plan's roles have changed speed so much that a new plan is needed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from trimtab.errors import TrimtabError
from trimtab.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Follow:
    """When a running job checks whether its plan still fits. The defaults suit steps of any length."""

    look: int = 20
    """Steps between two checks."""

    calibrate: int = 2
    """Checks at first, and after each new plan, that only learn how measured times relate to predicted ones. A
    prediction that is wrong by a constant factor is then never mistaken for a change."""

    threshold: float = 1.15
    """A new plan is needed when one role has become slower than another by this factor."""

    patience: int = 2
    """Checks in a row that must show it."""

    def __post_init__(self) -> None:
        if self.look < 2 or self.calibrate < 1 or self.patience < 1 or not self.threshold > 1:
            raise TrimtabError(
                f"{self}: look is at least 2 steps, calibrate and patience at least 1, threshold above 1"
            )

    @property
    def delay(self) -> int:
        """Steps from a check to the switch, so that all ranks know the step in advance."""
        return max(1, min(self.look // 2, 5))


class Drift:
    """Follows the ratio of measured to predicted time of each role."""

    def __init__(self, rules: Follow) -> None:
        self._rules = rules
        self._first: list[Mapping[str, float]] = []
        self._shown: list[dict[str, float]] = []

    def look(self, ratios: Mapping[str, float]) -> dict[str, float] | None:
        """By role, how many times longer it takes than at first, if that requires a new plan; else None.

        Afterwards the ratios are learned again, because the new plan predicts other times.
        """
        if len(self._first) < self._rules.calibrate:
            self._first.append(dict(ratios))
            return None
        usual = {role: median(look[role] for look in self._first) for role in ratios}
        drift = {role: ratio / usual[role] for role, ratio in ratios.items()}
        if max(drift.values()) < self._rules.threshold * min(drift.values()):
            self._shown.clear()
            return None
        self._shown.append(drift)
        if len(self._shown) < self._rules.patience:
            return None
        typical = {role: median(look[role] for look in self._shown) for role in drift}
        self._first, self._shown = [], []
        return typical


def ratios(plan: Plan, seconds: Sequence[float], samples: Sequence[float]) -> dict[str, float]:
    """By role, the median over its ranks of measured time over the time predicted for its samples."""
    by_role: dict[str, list[float]] = {}
    for rank, (measured, share) in enumerate(zip(seconds, samples, strict=True)):
        name = plan.role_of(rank)
        role = plan.roles[name]
        growing = max(role.compute_s - role.fixed_s, 0.0)
        by_role.setdefault(name, []).append(measured / (role.fixed_s + growing * share / role.samples))
    return {name: median(of) for name, of in by_role.items()}
