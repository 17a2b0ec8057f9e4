"""A job whose precisions can be changed, as the allocator sees it; and the simplest one, where everything adds up."""

from __future__ import annotations

from math import fsum
from typing import TYPE_CHECKING, Any, Protocol

from trimtab.planning.precision.options import memory_of, option_of, own_only, seconds_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.planning.precision.options import Chosen, Options


class AdjustableJob(Protocol):
    """A job whose operators' precisions can be changed, with its time and memory."""

    def change(self, role: str, operator: str, precision: str) -> Any:
        """Set an operator of a role; returns the argument of `undo`."""
        ...

    def undo(self, change: Any) -> None:
        """Undo the last change, exactly."""
        ...

    def step_s(self) -> float:
        """Step time of the whole job."""
        ...

    def compute_s(self, role: str) -> float:
        """Compute time of a rank of the role until gradients are reduced, with its device to itself."""
        ...

    def peak(self, role: str) -> int:
        """Peak memory of a rank of the role, in bytes."""
        ...


class AdditiveJob:
    """Seconds and bytes of operators add up; a step lasts as long as its slowest rank and what is exposed."""

    def __init__(
        self,
        options: Mapping[str, Options],
        *,
        base_s: Mapping[str, float] | None = None,
        base_bytes: Mapping[str, int] | None = None,
        least_s: float = 0.0,
        exposed_s: float = 0.0,
    ) -> None:
        """
        Args:
            options: by role.
            base_s: by role, its compute time besides these operators.
            base_bytes: by role, its memory besides these operators.
            least_s: compute time of the slowest rank that has none of these roles.
            exposed_s: step time beyond the computation of its slowest rank.
        """
        self.options = options
        self.base_s, self.base_bytes = base_s or {}, base_bytes or {}
        self.least_s, self.exposed_s = least_s, exposed_s
        self.chosen: dict[str, Chosen] = {role: own_only(own) for role, own in options.items()}

    def change(self, role: str, operator: str, precision: str) -> tuple[str, str, str]:
        before = self.chosen[role][operator]
        option_of(self.options[role], operator, precision)  # raises if it does not exist
        self.chosen[role][operator] = precision
        return role, operator, before

    def undo(self, change: tuple[str, str, str]) -> None:
        role, operator, before = change
        self.chosen[role][operator] = before

    def step_s(self) -> float:
        return max([self.least_s, *map(self.compute_s, self.options)]) + self.exposed_s

    def compute_s(self, role: str) -> float:
        return fsum((self.base_s.get(role, 0.0), seconds_of(self.options[role], self.chosen[role])))

    def peak(self, role: str) -> int:
        return self.base_bytes.get(role, 0) + memory_of(self.options[role], self.chosen[role])
