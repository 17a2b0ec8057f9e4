"""The exact bit policy: a dynamic program over layers and bins of squared error."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

import numpy as np
import numpy.typing as npt

from trimtab.planning.compression.layer_options import LayerOptions, most_exact, within

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

BINS = 10_000
"""Steps into which the dynamic program divides the budget of squared error."""

ROUNDING = 1e-13
"""More than what rounding does to a sum of squares, as a fraction."""

MAX_CELLS = 1 << 24
"""Limit of the program's table (64 MiB): with very many open layers, bins become wider instead."""


def dynamic(layers: Sequence[LayerOptions], budget: float, bins: int = BINS) -> list[int]:
    """The cheapest options (by index) within the budget, exact up to the width of the bins.

    1. Relax: one price for squared error gives every layer its best option, hence a lower bound of the
       cost and, once the remaining budget is filled, an assignment.
    2. Drop every option that could not beat that assignment even if all others were perfect, which is
       most of them; layers with one option left are settled exactly.
    3. For the rest, compute the least cost for every number of bins of squared error spent. Errors are rounded
       up, so what fits in bins truly fits; what rounding left unused is filled at the end.
    """
    # A budget equal to an assignment's own error must admit it although sums are rounded: try slightly more
    # than the budget first and, if that was too much, slightly less.
    for margin in (ROUNDING, -ROUNDING):
        chosen = _solve(layers, Table(layers, budget, margin), budget, bins)
        if within(layers, chosen, budget):
            return chosen
    return most_exact(layers)


def _solve(layers: Sequence[LayerOptions], table: Table, budget: float, bins: int) -> list[int]:
    price, bound = table.relax()
    chosen = table.fill(table.cheapest(price))
    priced = table.priced(price)
    reduced = priced - priced.min(axis=1, keepdims=True)
    gap = table.cost(chosen) - bound
    if gap > 0:
        chosen = _better(table, chosen, table.fill(_over_bins(table, reduced < gap, bins)))
    for index in range(table.costs.shape[1]):
        # Never more expensive than the same option everywhere, which the bins may have rounded out of the budget.
        same = np.full(len(layers), index)
        if table.there[:, index].all() and within(layers, same.tolist(), budget):
            chosen = _better(table, chosen, same)
    return [int(i) for i in chosen]


class Table:
    """Errors and costs of all layers as arrays (layer × option), and the budget of squared error."""

    def __init__(self, layers: Sequence[LayerOptions], budget: float, margin: float = -ROUNDING) -> None:
        """`margin` is added to the budget as a fraction of it, because sums are rounded."""
        widest = max(len(layer.options) for layer in layers)
        shape = (len(layers), widest)
        self.costs: Floats = np.full(shape, np.inf)
        self.squares: Floats = np.full(shape, np.inf)
        for row, layer in enumerate(layers):
            self.costs[row, : len(layer.costs)] = layer.costs
            self.squares[row, : len(layer.errors)] = np.square(layer.errors)
        self.there = np.isfinite(self.costs)
        self._rows = np.arange(len(layers))
        self.room = budget * budget * (1 + margin)
        self.least = self._order(self.squares, self.costs)
        """The most exact option of each layer, the cheapest of equals."""

    def at(self, values: Floats, chosen: Indices) -> Floats:
        picked: Floats = values[self._rows, chosen]
        return picked

    def cost(self, chosen: Indices) -> float:
        return fsum(self.at(self.costs, chosen))

    def spent(self, chosen: Indices) -> float:
        return fsum(self.at(self.squares, chosen))

    def cheapest(self, price: float) -> Indices:
        """Each layer's best option when squared error costs `price`; the more exact one of equals."""
        return self._order(self.priced(price), self.squares)

    def priced(self, price: float) -> Floats:
        """Total cost of every option when squared error costs `price`."""
        with np.errstate(invalid="ignore"):
            total: Floats = np.where(self.there, self.costs + price * self.squares, np.inf)
        return total

    def relax(self) -> tuple[float, float]:
        """The lowest price at which the layers' own best options fit the budget, and the bound it gives."""
        if self.spent(self.cheapest(0.0)) <= self.room:
            return 0.0, self.cost(self.cheapest(0.0))
        prices = self._prices()
        low, high = -1, len(prices)  # prices[low] does not fit, prices[high] does
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.spent(self.cheapest(prices[middle])) <= self.room
            low, high = (low, middle) if fits else (middle, high)
        if high == len(prices):
            return 0.0, 0.0
        price = float(prices[high])
        chosen = self.cheapest(price)
        return price, self.cost(chosen) - price * (self.room - self.spent(chosen))

    def fill(self, chosen: Indices) -> Indices:
        """Spend the rest of the budget: repeatedly make the change that saves most among those that fit.

        Starts from the most exact options when the given ones do not fit.
        """
        chosen = (chosen if self.spent(chosen) <= self.room else self.least).copy()
        while True:
            slack = self.room - self.spent(chosen)
            more = self.squares - self.at(self.squares, chosen)[:, None]
            saved = np.where(more <= slack, self.at(self.costs, chosen)[:, None] - self.costs, 0.0)
            best = int(saved.argmax())
            if not saved.flat[best] > 0:
                return chosen
            chosen[best // saved.shape[1]] = best % saved.shape[1]

    def _prices(self) -> Floats:
        """Prices at which some layer changes its option, in increasing order."""
        ratios = []
        for i in range(self.costs.shape[1]):
            for j in range(i):
                both = self.there[:, i] & self.there[:, j]
                less = self.costs[both, j] - self.costs[both, i]
                more = self.squares[both, i] - self.squares[both, j]
                with np.errstate(all="ignore"):
                    ratios.append(less / more)
        prices = np.concatenate(ratios) if ratios else np.zeros(0)
        # Slightly above each, where the more exact of the two wins whatever the rounding.
        rising: Floats = np.unique(prices[np.isfinite(prices) & (prices > 0)]) * (1 + 1e-9)
        return rising

    def _order(self, first: Floats, then: Floats) -> Indices:
        tied = first == first.min(axis=1, keepdims=True)
        chosen: Indices = np.where(tied, then, np.inf).argmin(axis=1)
        return chosen


def _over_bins(table: Table, kept: npt.NDArray[np.bool_], bins: int) -> Indices:
    """The dynamic program over the remaining options."""
    kept = kept & table.there
    squares = np.where(kept, table.squares, np.inf)
    chosen = np.where(kept.any(axis=1), squares.argmin(axis=1), table.least)
    room = table.room - table.spent(chosen)
    open_rows = [row for row in range(len(chosen)) if kept[row].sum() > 1]
    if room <= 0 or not open_rows:
        return chosen
    bins = min(bins, MAX_CELLS // len(open_rows))
    moves = []
    for row in open_rows:
        extra = (table.squares[row] - table.squares[row, chosen[row]]) / room * bins
        fitting = [i for i in np.flatnonzero(kept[row]) if extra[i] <= bins]
        # By increasing error, and only where more error saves cost.
        fitting.sort(key=lambda i: (extra[i], table.costs[row, i]))
        cost = (table.costs[row] - table.costs[row, fitting].min()).astype(np.float32)
        steps: list[tuple[int, int, np.float32]] = []
        for i in fitting:
            if not steps or cost[i] < steps[-1][2]:
                steps.append((int(i), int(np.ceil(extra[i])), cost[i]))
        moves.append(steps)
    # Costs beyond each layer's cheapest, in single precision: half the memory traffic, and 7 digits of a difference.
    least = np.empty((len(moves) + 1, bins + 1), dtype=np.float32)
    spare = np.empty(bins + 1, dtype=np.float32)
    least[0] = 0.0
    for step, options in enumerate(moves):
        before, after = least[step], least[step + 1]
        np.add(before, options[0][2], out=after)
        for _, weight, more in options[1:]:
            rest = bins + 1 - weight
            np.add(before[:rest], more, out=spare[:rest])
            np.minimum(after[weight:], spare[:rest], out=after[weight:])
    at = bins
    for step in range(len(moves) - 1, -1, -1):
        target = least[step + 1, at]
        for index, weight, more in moves[step]:
            if weight <= at and least[step, at - weight] + more == target:
                chosen[open_rows[step]] = index
                at -= weight
                break
    return chosen


def _better(table: Table, first: Indices, second: Indices) -> Indices:
    return second if table.cost(second) < table.cost(first) else first
