"""What the allocator chooses among: every operator in every precision, and the job whose precisions it changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import fsum
from typing import Any, Protocol

from trimtab.errors import TrimtabError
from trimtab.precision_names import OWN


class DoesNotFitError(TrimtabError):
    """The memory of some rank does not hold its share; smaller micro-batches might."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One operator in one precision."""

    precision: str
    """`OWN` for the model's."""

    seconds: float
    damage: float
    memory: int = 0
    """Contribution to peak memory in bytes, up to a constant that all options of the operator share."""


Options = dict[str, tuple[Option, ...]]
"""By operator; the first option is the most damaging."""

Chosen = dict[str, str]
"""Precision by operator."""


def ladder(options: Iterable[Option], *, memory: bool) -> tuple[Option, ...]:
    """Options from the most damaging to the least, without those that another one dominates.

    Args:
        memory: whether memory counts, too.
    """
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (o.damage, o.seconds, o.memory)):
        if not any(
            better.seconds <= option.seconds and (not memory or better.memory <= option.memory)
            for better in kept
        ):
            kept.append(option)
    return tuple(reversed(kept))


def own_only(options: Options) -> Chosen:
    return dict.fromkeys(options, OWN)


def lowered(chosen: Mapping[str, str]) -> Chosen:
    """The operators that are not in the model's own precision."""
    return {operator: precision for operator, precision in chosen.items() if precision != OWN}


def option_of(options: Options, operator: str, precision: str) -> Option:
    return next(option for option in options[operator] if option.precision == precision)


def damages_of(options: Options) -> dict[str, dict[str, float]]:
    """By operator and precision."""
    return {name: {o.precision: o.damage for o in several} for name, several in options.items()}


def damage_of(options: Options, chosen: Mapping[str, str]) -> float:
    return fsum(option_of(options, operator, precision).damage for operator, precision in chosen.items())


def seconds_of(options: Options, chosen: Mapping[str, str]) -> float:
    return fsum(option_of(options, operator, precision).seconds for operator, precision in chosen.items())


def memory_of(options: Options, chosen: Mapping[str, str]) -> int:
    return sum(option_of(options, operator, precision).memory for operator, precision in chosen.items())


def scaled(options: Options, *, seconds: float = 1.0, damage: float = 1.0, memory: float = 1.0) -> Options:
    """All options with their figures scaled."""
    return {
        operator: tuple(
            replace(o, seconds=o.seconds * seconds, damage=o.damage * damage, memory=round(o.memory * memory))
            for o in several
        )
        for operator, several in options.items()
    }


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
