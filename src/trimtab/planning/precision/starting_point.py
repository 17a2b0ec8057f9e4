"""The allocator's starting point: every operator at its fastest precision that fits, and its options from there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trimtab.planning.precision.options import (
    AdjustableJob,
    Chosen,
    DoesNotFitError,
    Option,
    Options,
    option_of,
)
from trimtab.precision_names import OWN


@dataclass(frozen=True, kw_only=True)
class Lowerable:
    """A role whose operators may be lowered."""

    damages: Mapping[str, Mapping[str, float]]
    """By operator and precision: damage of one of its ranks with its share of the batch."""

    ranks: int = 1
    memory_bytes: int | None = None
    """Memory of its device; None for no limit."""

    alike: tuple[tuple[str, ...], ...] = ()
    """Operators in the same place of repeated blocks: what is true of the first is true of the others."""

    def groups(self) -> list[tuple[str, ...]]:
        """All operators, identical ones together, in the order of `damages`."""
        group_of = {name: group for group in self.alike for name in group}
        groups: dict[str, tuple[str, ...]] = {}
        for name in self.damages:
            group = group_of.get(name, (name,))
            groups.setdefault(group[0], tuple(n for n in group if n in self.damages))
        return list(groups.values())


def fastest(job: AdjustableJob, name: str, role: Lowerable) -> Chosen:
    """Set a role to its fastest precisions that fit; identical operators get the same.

    Raises:
        TrimtabError: nothing fits; the message says how much memory is missing.
    """
    chosen: Chosen = dict.fromkeys(role.damages, OWN)
    for _ in range(2):  # twice, because the first pass changes the neighbors
        again = False
        for group in role.groups():
            best = _fastest_of(job, name, role, group[0], chosen[group[0]])
            again |= best != chosen[group[0]]
            for operator in group:
                if chosen[operator] != best:
                    job.change(name, operator, best)
                    chosen[operator] = best
        if not again:
            break
    if role.memory_bytes is not None and job.peak(name) > role.memory_bytes:
        _fit(job, name, role, chosen)
    return chosen


def _fastest_of(job: AdjustableJob, name: str, role: Lowerable, operator: str, now: str) -> str:
    times = {}
    for precision, _ in sorted(
        _levels(role, operator), key=lambda level: level[1]
    ):  # the least damaging first
        change = job.change(name, operator, precision) if precision != now else None
        times[precision] = job.compute_s(name)
        if change is not None:
            job.undo(change)
    return min(times, key=lambda precision: times[precision])


def _fit(job: AdjustableJob, name: str, role: Lowerable, chosen: Chosen) -> None:
    """Lower further operators, those that save most memory for their time first, until the role fits."""
    assert role.memory_bytes is not None
    start = dict(chosen)
    options = priced(job, name, role, chosen)
    smaller = []
    for operator, several in options.items():
        now = option_of(options, operator, chosen[operator])
        for option in several:
            saved = now.memory - option.memory
            if saved > 0:
                smaller.append(((option.seconds - now.seconds) / saved, operator, option))
    smaller.sort(key=lambda found: found[0])
    for _, operator, option in smaller:
        now = option_of(options, operator, chosen[operator])
        if option.memory >= now.memory:
            continue
        job.change(name, operator, option.precision)
        chosen[operator] = option.precision
        if job.peak(name) <= role.memory_bytes:
            return
    # If the peak is elsewhere, a single operator changes nothing although all of them together do.
    least = job.peak(name)
    every = dict.fromkeys(p for operator in role.damages for p, _ in _levels(role, operator))
    for wanted in every:
        for operator in chosen:
            precision = wanted if wanted in dict(_levels(role, operator)) else start[operator]
            if precision != chosen[operator]:
                job.change(name, operator, precision)
                chosen[operator] = precision
        if job.peak(name) <= role.memory_bytes:
            return
        least = min(least, job.peak(name))
    raise DoesNotFitError(
        f"{name}: a step needs {least / 2**30:.3g} GiB even with every operator at the precision that needs least, and "
        f"its device has {role.memory_bytes / 2**30:.3g} GiB: {(least - role.memory_bytes) / 2**20:,.2f} MiB are "
        "missing; give it fewer samples, probe lower precisions, or use more ranks"
    )


def priced(job: AdjustableJob, name: str, role: Lowerable, chosen: Mapping[str, str]) -> Options:
    """Seconds, damage and memory of every operator in every precision, with the others as they are now."""
    limited = role.memory_bytes is not None
    options: Options = {}
    for group in role.groups():
        first = group[0]
        measured: dict[str, tuple[float, int]] = {}
        for precision, _ in _levels(role, first):
            change = job.change(name, first, precision) if precision != chosen[first] else None
            measured[precision] = job.compute_s(name), job.peak(name) if limited else 0
            if change is not None:
                job.undo(change)
        least_s = min(seconds for seconds, _ in measured.values())
        least_bytes = min(peak for _, peak in measured.values())
        for operator in group:
            options[operator] = tuple(
                Option(
                    precision=precision,
                    seconds=measured[precision][0] - least_s,
                    damage=damage,
                    memory=measured[precision][1] - least_bytes,
                )
                for precision, damage in _levels(role, operator)
            )
    return {operator: options[operator] for operator in role.damages}


def _levels(role: Lowerable, operator: str) -> Iterable[tuple[str, float]]:
    own = role.damages[operator]
    return ((OWN, 0.0), *((precision, damage) for precision, damage in own.items() if precision != OWN))
