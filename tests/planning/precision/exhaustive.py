"""The oracle of the allocator and of the exact solver: every choice, tried."""

from __future__ import annotations

from itertools import product
from math import fsum
from typing import TYPE_CHECKING

from trimtab.precision_names import OWN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.planning.precision.options import AdjustableJob, Chosen
    from trimtab.planning.precision.starting_point import Lowerable


def exhaustive(
    job: AdjustableJob, roles: Mapping[str, Lowerable], *, limit_s: float
) -> dict[str, Chosen] | None:
    """The least damaging of all choices within the step time and memory limits; every one is replayed.

    `job` is left with nothing lowered. Damages are those of `Lowerable`.
    """
    places = [
        (name, operator, (OWN, *(p for p in role.damages[operator] if p != OWN)))
        for name, role in roles.items()
        for operator in role.damages
    ]
    best: tuple[float, dict[str, Chosen]] | None = None
    for precisions in product(*(offered for _, _, offered in places)):
        changes = [
            job.change(name, operator, precision)
            for (name, operator, _), precision in zip(places, precisions, strict=True)
            if precision != OWN
        ]
        fits = all(
            role.memory_bytes is None or job.peak(name) <= role.memory_bytes for name, role in roles.items()
        )
        damage = fsum(
            roles[name].ranks * roles[name].damages[operator].get(precision, 0.0)
            for (name, operator, _), precision in zip(places, precisions, strict=True)
        )
        if fits and (best is None or damage < best[0]) and job.step_s() <= limit_s:
            chosen: dict[str, Chosen] = {name: {} for name in roles}
            for (name, operator, _), precision in zip(places, precisions, strict=True):
                chosen[name][operator] = precision
            best = damage, chosen
        for change in reversed(changes):
            job.undo(change)
    return None if best is None else best[1]
