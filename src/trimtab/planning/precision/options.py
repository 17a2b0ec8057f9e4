"""The allocator's options: every operator in every precision, with its seconds, damage and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import fsum
from typing import TYPE_CHECKING

from trimtab.precision_names import OWN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


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
