"""Which operators of which ranks are lowered: just enough to keep the pace and to fit the memory.

1. Start each role at its fastest precisions that fit its memory.
2. The step time from there, or the other ranks' own time if that is longer, is the pace to keep.
3. Recover: raise the operator that gains most, one at a time, as long as the replayed step keeps the pace
   and the memory suffices; undo what does not.
4. Refine: recovering in the order of damage ignores what each raise costs. So it is also done in the order of
   damage per second, and compared with the best trade-off of the operators' own seconds and damages (see
   `frontier`); the least damaging choice that keeps the pace when replayed wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import fsum, inf
from types import MappingProxyType

from trimtab.planning.precision.frontier import Frontier, within_both
from trimtab.planning.precision.options import (
    AdjustableJob,
    Chosen,
    Option,
    Options,
    damage_of,
    ladder,
    memory_of,
    option_of,
    seconds_of,
)
from trimtab.planning.precision.starting_point import Lowerable, fastest, priced

TOLERANCE = 0.002
"""Fraction by which a step may exceed the pace. Far below the error of predictions; without it the last digit
of a sum would decide."""

ATTEMPTS = 8
"""How often a choice that misses the pace when replayed is made slightly faster and tried again."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What the allocator chose."""

    chosen: dict[str, Chosen]
    """By role and operator; `OWN` for the model's precision."""

    options: dict[str, Options]
    """The options by role."""

    pace_s: float
    """The step time to keep."""

    step_s: float
    damage: float
    """Damage of all ranks of these roles."""

    start_damage: float
    """Damage at the start, with every operator at its fastest precision that fits."""

    recovered: int
    """Operators that were raised since."""


def allocate(
    job: AdjustableJob, roles: Mapping[str, Lowerable], *, others_s: float = 0.0, ahead: float = 0.0
) -> Allocation:
    """Lower the given roles just enough to keep the pace of their fastest precisions. `job` is left in that state.

    Args:
        job: the job, nothing lowered yet.
        others_s: step time of the other ranks by themselves; no role needs to be faster.
        ahead: fraction of that by which the lowered roles should finish earlier, where they can: step times vary,
            and the slower of two ranks that are equal on average sets the pace of every step.

    Raises:
        TrimtabError: a role does not fit its memory at any precisions; the message says how much is missing.
    """
    start = {name: fastest(job, name, role) for name, role in roles.items()}
    most = {name: max((1 - ahead) * others_s, job.compute_s(name)) for name in roles} if ahead else {}
    return _improved(job, roles, start, max(job.step_s(), others_s), most)


def relieve(
    job: AdjustableJob, roles: Mapping[str, Lowerable], chosen: Mapping[str, Chosen], *, pace_s: float
) -> Allocation:
    """Raise operators that need not be lowered to keep a given pace; `job` is in the state `chosen`."""
    return _improved(job, roles, chosen, pace_s)


def _improved(
    job: AdjustableJob,
    roles: Mapping[str, Lowerable],
    start: Mapping[str, Chosen],
    pace_s: float,
    most: Mapping[str, float] = MappingProxyType({}),
) -> Allocation:
    options = {name: priced(job, name, role, start[name]) for name, role in roles.items()}
    own = {name: seconds * (1 + TOLERANCE) for name, seconds in most.items()}
    recovery = _Recovery(job, roles, options, start, pace_s * (1 + TOLERANCE), own)
    before = recovery.damage()
    recovery.improve()
    return Allocation(
        chosen={name: dict(own) for name, own in recovery.chosen.items()},
        options=options,
        pace_s=pace_s,
        step_s=job.step_s(),
        damage=recovery.damage(),
        start_damage=before,
        recovered=sum(recovery.chosen[n][o] != precision for n in roles for o, precision in start[n].items()),
    )


# Recovering


class _Recovery:
    """Roles at some precisions, and the search for operators that can be raised."""

    def __init__(
        self,
        job: AdjustableJob,
        roles: Mapping[str, Lowerable],
        options: Mapping[str, Options],
        chosen: Mapping[str, Chosen],
        limit_s: float,
        most: Mapping[str, float],
    ) -> None:
        """`limit_s` limits the step time, `most` the compute time of roles."""
        self.job, self.roles, self.options, self.limit_s = job, roles, options, limit_s
        self._most = most
        self.chosen = {name: dict(own) for name, own in chosen.items()}

    def damage(self) -> float:
        return fsum(
            role.ranks * damage_of(self.options[name], self.chosen[name]) for name, role in self.roles.items()
        )

    def improve(self) -> None:
        """Recover in both orders, refine, and keep the least damaging result."""
        start, results = self._saved(), []
        for order in ("damage", "rate"):
            self._set(start)
            self.recover(order)
            results.append((self.damage(), self._saved()))
        self._set(min(results, key=lambda one: one[0])[1])  # the first of equals
        if self.refine():
            self.recover("rate")

    def recover(self, order: str) -> None:
        """Raise one operator after another, the one first that gains most ("damage"), or most per second ("rate")."""
        ladders = {
            (name, operator): ladder(several, memory=self.roles[name].memory_bytes is not None)
            for name, own in self.options.items()
            for operator, several in own.items()
        }
        heap: list[tuple[float, int]] = []
        entries: list[tuple[str, str, Option]] = []

        def push(name: str, operator: str) -> None:
            now = option_of(self.options[name], operator, self.chosen[name][operator])
            higher = [o for o in ladders[name, operator] if o.damage < now.damage]
            if not higher:
                return
            gain = (now.damage - higher[0].damage) * self.roles[name].ranks
            if order == "rate":
                gain /= max(higher[0].seconds - now.seconds, 1e-12)
            entries.append((name, operator, higher[0]))
            heap.append((-gain, len(entries) - 1))

        for name, operator in ladders:
            push(name, operator)
        heapify(heap)
        while heap:
            name, operator, option = entries[heappop(heap)[1]]
            if self._missed(name, {operator: option.precision}) is not None:
                continue
            size = len(heap)
            push(name, operator)
            if len(heap) > size:
                heappush(heap, heap.pop())

    def refine(self) -> bool:
        """Replace a role's choice by a better trade-off of seconds and damage, if that keeps the pace."""
        better = False
        for name, role in self.roles.items():
            options = self.options[name]
            if damage_of(options, self.chosen[name]) == 0:
                continue
            # An upper bound: what other roles or the link add shows when the choice is tried.
            limit = min(self.limit_s, self._most.get(name, inf))
            room = seconds_of(options, self.chosen[name]) + max(0.0, limit - self.job.compute_s(name))
            better |= self._trade(name, room, role.memory_bytes)
        return better

    def _trade(self, name: str, room: float, limit: int | None) -> bool:
        """Try the best trade-off within so many seconds; one that misses the pace or the memory is made tighter.

        With a memory limit, under the approximation that bytes add up.
        """
        options = self.options[name]
        damage = damage_of(options, self.chosen[name])
        frontier = Frontier(options) if limit is None else None
        free = 0 if limit is None else memory_of(options, self.chosen[name]) + limit - self.job.peak(name)
        for _ in range(ATTEMPTS):
            if frontier is None:
                choice = within_both(options, seconds=room, memory=free)
            else:
                place = frontier.place(room)
                choice = None if place is None else frontier.chosen(place)
            if choice is None or damage_of(options, choice) >= damage * (1 - 1e-9):
                return False
            missed = self._missed(name, choice)
            if missed is None:
                return True
            late, over = missed
            if late > 0:
                room = min(room, seconds_of(options, choice)) - max(late, 1e-6 * room)
            if over > 0:
                free = min(free, memory_of(options, choice)) - over
        return False

    def _missed(self, name: str, wanted: Mapping[str, str]) -> tuple[float, int] | None:
        """Change operators; undo it if that misses the pace or the memory, and return by how much. None: kept."""
        made = [
            self.job.change(name, operator, precision)
            for operator, precision in wanted.items()
            if precision != self.chosen[name][operator]
        ]
        limit = self.roles[name].memory_bytes
        late = self._late(name)
        over = 0 if limit is None else max(0, self.job.peak(name) - limit)
        if not late and not over:
            self.chosen[name].update(wanted)
            return None
        for change in reversed(made):
            self.job.undo(change)
        return late, over

    def _late(self, name: str) -> float:
        """Seconds by which the step, or the role by itself, is too slow."""
        own = self.job.compute_s(name) - self._most[name] if name in self._most else 0.0
        return max(0.0, self.job.step_s() - self.limit_s, own)

    def _saved(self) -> dict[str, Chosen]:
        return {name: dict(own) for name, own in self.chosen.items()}

    def _set(self, chosen: Mapping[str, Chosen]) -> None:
        for name, own in chosen.items():
            for operator, precision in own.items():
                if precision != self.chosen[name][operator]:
                    self.job.change(name, operator, precision)
                    self.chosen[name][operator] = precision
