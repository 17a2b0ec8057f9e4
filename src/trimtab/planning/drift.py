"""When the pace of a plan's roles has changed so much that another plan is due. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Follow:
    """When a running job looks whether its plan still fits. The defaults suit steps of any length."""

    look: int = 20
    """Steps between two looks."""

    calibrate: int = 2
    """Looks at first, and after each new plan, that only learn how measured times relate to predicted ones. A
    prediction that is wrong by a constant factor then never looks like a change."""

    threshold: float = 1.15
    """A new plan is due when one role has become slower than another by this factor."""

    patience: int = 2
    """Looks in a row that must show it."""

    def __post_init__(self) -> None:
        if self.look < 2 or self.calibrate < 1 or self.patience < 1 or not self.threshold > 1:
            raise TrimtabError(
                f"{self}: look is at least 2 steps, calibrate and patience at least 1, threshold above 1"
            )

    @property
    def delay(self) -> int:
        """Steps from a look to the switch: all ranks know the step beforehand."""
        return max(1, min(self.look // 2, 5))


class Drift:
    """Watches each role's measured over predicted time, look by look."""

    def __init__(self, rules: Follow) -> None:
        self._rules = rules
        self._first: list[Mapping[str, float]] = []
        self._shown: list[dict[str, float]] = []

    def look(self, ratios: Mapping[str, float]) -> dict[str, float] | None:
        """By role how many times longer it takes than at first, when that calls for another plan; else None.

        After that it learns anew: what the plan predicts, and what is measured, are others then.
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
    """By role the median over its ranks of measured time over what was predicted for so many samples."""
    found: dict[str, list[float]] = {}
    for rank, (taken, share) in enumerate(zip(seconds, samples, strict=True)):
        name = plan.role_of(rank)
        role = plan.roles[name]
        growing = max(role.compute_s - role.fixed_s, 0.0)
        found.setdefault(name, []).append(taken / (role.fixed_s + growing * share / role.samples))
    return {name: median(of) for name, of in found.items()}
