"""How far the allocator is from the optimum: an exact solver."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import fsum
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.planning.precision.allocate import TOLERANCE, allocate
from trimtab.planning.precision.options import (
    AdditiveJob,
    Chosen,
    Options,
    damage_of,
    damages_of,
    memory_of,
    seconds_of,
)
from trimtab.planning.precision.starting_point import Lowerable


def exact(options: Options, *, seconds: float, memory: int | None = None) -> Chosen | None:
    """The least damaging choice within limits of seconds (and bytes); None if there is none.

    Raises:
        TrimtabError: SciPy is not installed.
    """
    try:
        from scipy.optimize import milp
    except ModuleNotFoundError:
        raise TrimtabError(
            "the exact solver needs SciPy, which is not installed: pip install 'trimtab[exact]'"
        ) from None

    def fits(chosen: Chosen) -> bool:
        within = seconds_of(options, chosen) <= seconds * (1 + 1e-12)
        return within and (memory is None or memory_of(options, chosen) <= memory)

    # The solver may violate constraints by a millionth: then they are tightened a little.
    for less in (0.0, 2e-6, 1e-5):
        solution = _solved(milp, options, seconds, memory, less)
        if solution is None or fits(solution):
            break
    if solution is not None and fits(solution):
        return solution
    fastest = {name: min(several, key=lambda o: o.seconds).precision for name, several in options.items()}
    return fastest if fits(fastest) else None


def _solved(milp: Any, options: Options, seconds: float, memory: int | None, less: float) -> Chosen | None:
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint

    flat = [(operator, option) for operator, several in options.items() for option in several]
    # In units near one: the solver's tolerances are absolute.
    worst = max((option.damage for _, option in flat), default=0.0) or 1.0
    unit = max((option.seconds for _, option in flat), default=0.0) or 1.0
    one_each = np.array([[float(name == operator) for name, _ in flat] for operator in options])
    constraints = [
        LinearConstraint(one_each, 1.0, 1.0),
        LinearConstraint(np.array([[o.seconds / unit for _, o in flat]]), -np.inf, seconds / unit - less),
    ]
    if memory is not None:
        most = max((abs(option.memory) for _, option in flat), default=0) or 1
        sizes = np.array([[o.memory / most for _, o in flat]])
        constraints.append(LinearConstraint(sizes, -np.inf, memory / most - less))
    with _quiet():
        solved = milp(
            np.array([option.damage / worst for _, option in flat]),
            integrality=np.ones(len(flat)),
            bounds=Bounds(0, 1),
            constraints=constraints,
            options={"mip_rel_gap": 1e-9},
        )
    if solved.x is None:
        return None
    return {operator: o.precision for (operator, o), taken in zip(flat, solved.x, strict=True) if taken > 0.5}


@contextmanager
def _quiet() -> Iterator[None]:
    """HiGHS prints to the process's standard output regardless of its options, which would corrupt JSON there."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


@dataclass(frozen=True, kw_only=True)
class Grade:
    """The allocator compared with the exact solver, on operators that add up."""

    damage: float
    exact_damage: float

    @property
    def gap(self) -> float:
        """Fraction by which the allocator's damage exceeds the optimum; 0.02 is 2 %."""
        if self.damage <= self.exact_damage:
            return 0.0
        return self.damage / self.exact_damage - 1 if self.exact_damage > 0 else float("inf")


def grade(options: Options, *, pace_s: float) -> Grade:
    """Let the allocator and the exact solver lower the same operators of one role to the same pace.

    Args:
        options: with the seconds that operators take in each precision.
        pace_s: time limit of all operators together: the time of the rest of the cluster.
    """
    least = fsum(min(o.seconds for o in several) for several in options.values())
    # The allocator may exceed the pace by its tolerance, so the solver may, too.
    limit = max(pace_s, least)
    role = Lowerable(damages=damages_of(options))
    job = AdditiveJob({"role": options}, least_s=pace_s)
    solution = allocate(job, {"role": role}, others_s=pace_s)
    best = exact(options, seconds=limit * (1 + TOLERANCE))
    assert best is not None, "the fastest of each is within the limit"
    return Grade(damage=solution.damage, exact_damage=damage_of(options, best))
