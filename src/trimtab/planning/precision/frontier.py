"""The Pareto frontier between seconds and damage of a set of operators.

Operators add up, so this is a multiple-choice knapsack. Undominated partial choices are carried from operator to
operator; when they become too many, those of nearly equal time are thinned out. Times are never rounded, so
every point is feasible, and off the optimum only by what was thinned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trimtab.planning.precision.options import Chosen, Options, ladder

RESOLUTION = 4000
"""Partial choices that are kept."""

CELLS = 64
"""Intervals of time, and of memory, by which partial choices are thinned when both are limited."""


class Frontier:
    """For every time limit, the least damage with which the operators keep it."""

    def __init__(
        self, options: Options, *, price_of_memory: float = 0.0, resolution: int = RESOLUTION
    ) -> None:
        """
        Args:
            price_of_memory: damage that a byte counts as; zero when memory does not matter.
        """
        self.operators = list(options)
        self._ladders = [ladder(options[name], memory=price_of_memory > 0) for name in self.operators]
        self._parents: list[NDArray[np.int64]] = []
        self._picks: list[NDArray[np.int64]] = []
        seconds, cost = np.zeros(1), np.zeros(1)
        for steps in self._ladders:
            own_seconds = np.array([o.seconds for o in steps])
            own_cost = np.array([o.damage + price_of_memory * o.memory for o in steps])
            all_seconds = (seconds[:, None] + own_seconds[None, :]).ravel()
            all_cost = (cost[:, None] + own_cost[None, :]).ravel()
            order = np.lexsort((all_cost, all_seconds))
            order = order[_falling(all_cost[order])]
            order = order[_thinned(all_seconds[order], resolution)]
            self._parents.append(order // len(steps))
            self._picks.append(order % len(steps))
            seconds, cost = all_seconds[order], all_cost[order]
        self.seconds, self.cost = seconds, cost
        """Increasing, and decreasing."""

    def place(self, seconds: float) -> int | None:
        """Index of the least damaging point within a time limit; None if even the fastest is too slow."""
        place = int(np.searchsorted(self.seconds, seconds * (1 + 1e-12), side="right")) - 1
        return place if place >= 0 else None

    def chosen(self, place: int) -> Chosen:
        """The precisions of a point."""
        chosen: Chosen = {}
        for index in range(len(self.operators) - 1, -1, -1):
            pick = int(self._picks[index][place])
            chosen[self.operators[index]] = self._ladders[index][pick].precision
            place = int(self._parents[index][place])
        return {name: chosen[name] for name in self.operators}


def within_both(options: Options, *, seconds: float, memory: int) -> Chosen | None:
    """The least damaging choice found within limits of both seconds and bytes; None if there is none.

    Like `Frontier` with two limits: of partial choices of nearly equal time and size, the least damaging is kept.
    """
    names = list(options)
    ladders = [ladder(options[name], memory=True) for name in names]
    # The least that the remaining operators need.
    rest_s = np.append(np.cumsum([min(o.seconds for o in steps) for steps in ladders][::-1])[::-1], 0.0)
    rest_bytes = np.append(np.cumsum([min(o.memory for o in steps) for steps in ladders][::-1])[::-1], 0)
    seconds_so_far, bytes_so_far, cost = np.zeros(1), np.zeros(1), np.zeros(1)
    history: list[tuple[NDArray[np.int64], int]] = []
    for index, steps in enumerate(ladders):
        seconds_so_far = (seconds_so_far[:, None] + np.array([o.seconds for o in steps])).ravel()
        bytes_so_far = (bytes_so_far[:, None] + np.array([o.memory for o in steps])).ravel()
        cost = (cost[:, None] + np.array([o.damage for o in steps])).ravel()
        room_s, room_bytes = seconds - rest_s[index + 1], memory - rest_bytes[index + 1]
        kept = np.flatnonzero((seconds_so_far <= room_s * (1 + 1e-12)) & (bytes_so_far <= room_bytes))
        if not len(kept):
            return None
        cell = _cell(seconds_so_far[kept]) * CELLS + _cell(bytes_so_far[kept])
        order = kept[np.lexsort((bytes_so_far[kept], seconds_so_far[kept], cost[kept], cell))]
        cell = np.sort(cell, kind="stable")
        order = order[np.append(True, cell[1:] != cell[:-1])]
        history.append((order, len(steps)))
        seconds_so_far, bytes_so_far, cost = seconds_so_far[order], bytes_so_far[order], cost[order]
    place = int(np.lexsort((bytes_so_far, seconds_so_far, cost))[0]) if len(cost) else 0
    chosen: Chosen = {}
    for index in range(len(names) - 1, -1, -1):
        order, count = history[index]
        place, pick = divmod(int(order[place]), count)
        chosen[names[index]] = ladders[index][pick].precision
    return {name: chosen[name] for name in names}


def _cell(values: NDArray[np.float64]) -> NDArray[np.int64]:
    low, high = values.min(), values.max()
    if high <= low:
        return np.zeros(len(values), dtype=np.int64)
    cell: NDArray[np.int64] = ((values - low) * (CELLS / (high - low))).astype(np.int64)
    return np.minimum(cell, CELLS - 1)


def _falling(cost: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Where the cost is below all previous ones: slower and no less damaging points are useless."""
    least = np.minimum.accumulate(cost)
    return np.append(True, cost[1:] < least[:-1])


def _thinned(seconds: NDArray[np.float64], resolution: int) -> NDArray[np.int64]:
    """The least damaging point in each interval of time, and the fastest one."""
    count = len(seconds)
    if count <= resolution:
        return np.arange(count)
    cells = ((seconds - seconds[0]) * (resolution / (seconds[-1] - seconds[0]))).astype(np.int64)
    last = np.flatnonzero(np.append(cells[1:] != cells[:-1], True))
    return last if last[0] == 0 else np.concatenate(([0], last))
