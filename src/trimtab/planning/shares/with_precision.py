"""Batch shares and precisions together: the fastest step whose damage is within a budget.

Shares come first because they do no damage: every rank takes what it can compute in the model's own precision
within the step time. The remaining samples go where they do least damage. The fastest step time whose damage is
within the budget is found by bisection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import fsum, inf
from typing import Protocol

from trimtab.planning.precision.options import DoesNotFitError
from trimtab.planning.precision.tradeoffs import most_within

PRECISE = 1e-4
"""Relative precision of the step time that is found."""


class RankTradeoffs(Protocol):
    """What a rank of a device class can do within a time limit."""

    def own_s(self, device: str, samples: int) -> float:
        """Seconds of so many samples in the model's own precision; infinite where they do not fit."""
        ...

    def damage(self, device: str, samples: int, seconds: float) -> float:
        """The least damage of a rank that computes so many samples in time; infinite where it cannot."""
        ...


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A batch divided among ranks."""

    seconds: float
    """Time limit of every rank."""

    samples: dict[str, tuple[int, ...]]
    """By device class: the share of each of its ranks, larger shares first."""

    damage: float


def quickest(
    tradeoffs: RankTradeoffs,
    ranks: Mapping[str, int],
    total: int,
    *,
    budget: float,
    beside_s: Mapping[str, float] | None = None,
) -> Shared:
    """The shares with the fastest step whose damage is within a budget.

    Args:
        ranks: number of ranks by device class.
        total: samples of the batch, at least one for each rank.
        budget: damage of all ranks together.
        beside_s: by device class, step time in addition to that of `tradeoffs`.

    Raises:
        DoesNotFitError: no shares fit the memory, or only with more damage than allowed.
    """
    world = sum(ranks.values())
    assert total >= world
    beside = beside_s or {}
    high = max(_positive(tradeoffs, device, -(-total // world)) + beside.get(device, 0.0) for device in ranks)
    best = _fastest(lambda seconds: within(tradeoffs, ranks, total, seconds, beside), high, budget, 40)
    if best is None or best.damage > budget:
        raise _impossible(best, budget)
    return best


def _fastest(
    at: Callable[[float], Shared | None], high: float, budget: float, doublings: int
) -> Shared | None:
    """The fastest shares within the budget, by bisection; without any, those of the longest time limit tried.

    Args:
        at: the shares within a time limit.
        high: first limit, doubled up to `doublings` times until there are shares within the budget.
    """
    best = at(high)
    while best is None or best.damage > budget:
        if not doublings:
            return best
        high, doublings = high * 2, doublings - 1
        best = at(high)
    low = 0.0
    while high - low > PRECISE * high:
        middle = (low + high) / 2
        candidate = at(middle)
        if candidate is None or candidate.damage > budget:
            low = middle
        else:
            high, best = middle, candidate
    return best


def within(
    tradeoffs: RankTradeoffs,
    ranks: Mapping[str, int],
    total: int,
    seconds: float,
    beside_s: Mapping[str, float],
) -> Shared | None:
    """The least damaging shares with which every rank keeps the time limit; None if there are none."""
    room = {device: seconds - beside_s.get(device, 0.0) for device in ranks}
    level = {}
    for device in ranks:

        def in_time(samples: int, device: str = device) -> bool:
            return tradeoffs.own_s(device, samples) <= room[device]

        level[device] = max(1, most_within(in_time, total))
    free = sum(level[device] * count for device, count in ranks.items())
    if free >= total:
        return _shared(tradeoffs, ranks, seconds, room, level, free - total)
    # Beyond that, one sample after another goes where it does least damage.
    samples = {device: [level[device]] * count for device, count in ranks.items()}
    heap = [(_more(tradeoffs, d, level[d], room[d]), index, d) for index, d in enumerate(ranks)]
    heapify(heap)
    left = total - free
    while left and heap:
        cost, index, device = heappop(heap)
        if cost == inf:
            return None
        for rank in range(min(left, ranks[device])):
            samples[device][rank] += 1
            left -= 1
        level[device] += 1
        heappush(heap, (_more(tradeoffs, device, level[device], room[device]), index, device))
    return _measured(tradeoffs, seconds, room, samples)


def _more(tradeoffs: RankTradeoffs, device: str, samples: int, seconds: float) -> float:
    now = tradeoffs.damage(device, samples, seconds)
    return inf if now == inf else tradeoffs.damage(device, samples + 1, seconds) - now


def _shared(
    tradeoffs: RankTradeoffs,
    ranks: Mapping[str, int],
    seconds: float,
    room: Mapping[str, float],
    level: Mapping[str, int],
    spare: int,
) -> Shared | None:
    """Take away surplus samples, each time from the rank with the least time left."""
    samples = {device: [level[device]] * count for device, count in ranks.items()}
    heap = [
        (room[device] - tradeoffs.own_s(device, level[device]), index, device)
        for index, device in enumerate(ranks)
        if level[device] > 1
    ]
    heapify(heap)
    now = dict(level)
    while spare and heap:
        _, index, device = heappop(heap)
        for rank in range(min(spare, ranks[device])):
            samples[device][-1 - rank] -= 1
            spare -= 1
        now[device] -= 1
        if now[device] > 1:
            heappush(heap, (room[device] - tradeoffs.own_s(device, now[device]), index, device))
    assert not spare, "fewer samples than ranks"
    return _measured(tradeoffs, seconds, room, samples)


def _measured(
    tradeoffs: RankTradeoffs, seconds: float, room: Mapping[str, float], samples: Mapping[str, list[int]]
) -> Shared | None:
    damage = fsum(
        ranks * tradeoffs.damage(device, count, room[device])
        for device, counts in samples.items()
        for count, ranks in Counter(counts).items()
    )
    if damage == inf:
        return None
    ordered = {device: tuple(sorted(counts, reverse=True)) for device, counts in samples.items()}
    return Shared(seconds=seconds, samples=ordered, damage=damage)


def pace_for(
    tradeoffs: RankTradeoffs,
    samples: Mapping[str, tuple[int, ...]],
    *,
    budget: float,
    beside_s: Mapping[str, float] | None = None,
) -> Shared | None:
    """The fastest step with the given shares whose damage is within a budget; None if there is none."""
    beside = beside_s or {}

    def at(seconds: float) -> Shared | None:
        room = {device: seconds - beside.get(device, 0.0) for device in samples}
        return _measured(tradeoffs, seconds, room, {device: list(own) for device, own in samples.items()})

    high = max(
        _positive(tradeoffs, device, own[0]) + beside.get(device, 0.0) for device, own in samples.items()
    )
    best = _fastest(at, high, budget, 12)
    return None if best is None or best.damage > budget else best


def _positive(tradeoffs: RankTradeoffs, device: str, samples: int) -> float:
    own = tradeoffs.own_s(device, samples)
    return own if 0 < own < inf else 1e-6


def _impossible(best: Shared | None, budget: float) -> DoesNotFitError:
    if best is None:
        return DoesNotFitError(
            "the batch does not fit: however it is shared, some rank has too little memory even at the precisions "
            "that save least; lower the batch size, probe lower precisions, or use more ranks"
        )
    return DoesNotFitError(
        f"the batch fits only with operators lowered whose damage is {best.damage:.3g}, and {budget:.3g} is "
        "allowed; allow more (--damage), or lower the batch size"
    )
