"""Which setting every layer's gradient travels in: least cost at a bounded total error. Pure functions.

Nothing here knows the compressor: a layer is a name with options (bits, PowerSGD ranks, per-mille
densities), each with an error and a cost that were measured or predicted elsewhere. Errors of one run
are all of one family, since biased and unbiased errors do not share a budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum, isfinite, sqrt
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Floats = npt.NDArray[np.float64]
    Indices = npt.NDArray[np.intp]

BINS = 10_000
"""Steps into which the dynamic programme cuts the budget of squared error."""

ROUNDING = 1e-13
"""More than what rounding does to a sum of squares, as a fraction."""

MAX_CELLS = 1 << 24
"""Of the programme's table: with very many layers open, bins become wider, not memory larger (64 MiB)."""


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """A layer, and what each way to send its gradient would do and take."""

    name: str
    numel: int
    norm: float
    """Euclidean norm of the gradient that the errors were measured on."""

    options: tuple[int, ...]
    """Bits, PowerSGD ranks or per-mille densities, in rising cost."""

    errors: tuple[float, ...]
    """Euclidean norm of each option's error; need not fall as the cost rises."""

    costs: tuple[float, ...]
    """Seconds on the measured link, or bytes where no link is known."""

    def __post_init__(self) -> None:
        if not self.options or not len(self.options) == len(self.errors) == len(self.costs):
            raise ValueError(f"{self.name}: give each of its options ({self.options}) one error and one cost")
        if len(set(self.options)) != len(self.options):
            raise ValueError(f"{self.name}: an option appears twice in {self.options}")
        if not all(isfinite(v) and v >= 0 for v in (self.norm, *self.errors, *self.costs)):
            raise ValueError(
                f"{self.name}: norm, errors and costs must be finite and at least 0; got norm {self.norm}, "
                f"errors {self.errors}, costs {self.costs}"
            )


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """An option for every layer."""

    options: dict[str, int]
    """By layer name: bits, or whatever the options of the family are."""

    cost: float
    error: float
    """Square root of the sum of squared errors."""

    policy: str
    met: bool
    """Whether the error is within the budget; otherwise this is the most exact assignment there is."""


def block_cost(numel: int, bits: int, block: int = 1024, *, itemsize: int = 4) -> int:
    """Bytes on the wire of `numel` values in `bits` (0: as they are) with one range for each `block` values.

    The size table of docs/wire-format.md.
    """
    if numel == 0:
        return 0
    if bits == 0:
        return _align8(numel * itemsize)
    blocks = -(-numel // block)
    last = numel - (blocks - 1) * block
    return 8 * blocks + _align8((blocks - 1) * -(-block * bits // 8) + -(-last * bits // 8))


def total_error(errors: Iterable[float]) -> float:
    """Square root of the sum of squares, the same whatever the order."""
    return sqrt(fsum(error * error for error in errors))


def uniform_error(layers: Sequence[LayerOptions], option: int = 4) -> float:
    """Total error with the same option for every layer: what budgets are measured against."""
    return total_error(layer.errors[_index(layer, option)] for layer in layers)


def uniform_cost(layers: Sequence[LayerOptions], option: int = 4) -> float:
    """Total cost with the same option for every layer."""
    return fsum(layer.costs[_index(layer, option)] for layer in layers)


def choose_bits(layers: Sequence[LayerOptions], *, budget: float, policy: str = "dynamic") -> Assignment:
    """The cheapest assignment the policy finds whose total error is at most `budget`.

    Args:
        budget: of the total error, usually `uniform_error(layers, 4)` or a little more.
        policy: a name in `trimtab.planning.compression.policies.POLICIES`: dynamic (exact up to its bins), uniform,
            linear, kmeans or search.
    """
    # Imported here: the policies are built on this module.
    from trimtab.planning.compression.policies import POLICIES

    if policy not in POLICIES:
        raise ValueError(f"there is no policy {policy!r}; choose {', '.join(POLICIES)}")
    if not budget >= 0:
        raise ValueError(f"a budget of error is at least 0; got {budget}")
    if len({layer.name for layer in layers}) != len(layers):
        raise ValueError("two layers have the same name")
    exact = most_exact(layers)
    if not layers or not within(layers, exact, budget):
        return assigned(layers, exact, budget, policy)
    return assigned(layers, POLICIES[policy](layers, budget), budget, policy)


def dynamic(layers: Sequence[LayerOptions], budget: float, bins: int = BINS) -> list[int]:
    """The programme: the cheapest indices of options within the budget, exact up to its bins.

    1. Relax: one price for squared error gives every layer its best option, hence a lower bound of the
       cost and, with the room that is left filled up, an assignment.
    2. Drop every option that could not beat that assignment even if all others were perfect, which is
       most; the layers with one option left are settled exactly.
    3. Over the rest, least cost for every number of bins of squared error spent. Errors are rounded up, so
       what fits in bins truly fits; what rounding left unused is filled up at the end.
    """
    # A budget that is an assignment's own error must admit it, though sums are rounded: first a hair more
    # room than there is and, if that was too much, a hair less.
    for hair in (ROUNDING, -ROUNDING):
        found = _solve(layers, Table(layers, budget, hair), budget, bins)
        if within(layers, found, budget):
            return found
    return most_exact(layers)


def _solve(layers: Sequence[LayerOptions], table: Table, budget: float, bins: int) -> list[int]:
    price, bound = table.relax()
    found = table.fill(table.cheapest(price))
    priced = table.priced(price)
    reduced = priced - priced.min(axis=1, keepdims=True)
    gap = table.cost(found) - bound
    if gap > 0:
        found = _better(table, found, table.fill(_over_bins(table, reduced < gap, bins)))
    for index in range(table.costs.shape[1]):
        # Never dearer than the same option everywhere, which the bins may have rounded out of the budget.
        same = np.full(len(layers), index)
        if table.there[:, index].all() and within(layers, same.tolist(), budget):
            found = _better(table, found, same)
    return [int(i) for i in found]


class Table:
    """Errors and costs of all layers as arrays (layer × option), and the room for squared error."""

    def __init__(self, layers: Sequence[LayerOptions], budget: float, hair: float = -ROUNDING) -> None:
        """`hair`: how much more room there is than the budget's, as a fraction; sums are rounded."""
        widest = max(len(layer.options) for layer in layers)
        shape = (len(layers), widest)
        self.costs: Floats = np.full(shape, np.inf)
        self.squares: Floats = np.full(shape, np.inf)
        for row, layer in enumerate(layers):
            self.costs[row, : len(layer.costs)] = layer.costs
            self.squares[row, : len(layer.errors)] = np.square(layer.errors)
        self.there = np.isfinite(self.costs)
        self._rows = np.arange(len(layers))
        self.room = budget * budget * (1 + hair)
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
        """Each layer's best option when squared error costs `price`; the more exact of equals."""
        return self._order(self.priced(price), self.squares)

    def priced(self, price: float) -> Floats:
        """What every option costs when squared error costs `price`."""
        with np.errstate(invalid="ignore"):
            total: Floats = np.where(self.there, self.costs + price * self.squares, np.inf)
        return total

    def relax(self) -> tuple[float, float]:
        """The lowest price at which the layers' own best options fit the room, and the bound it gives."""
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
        """Spend what is left of the room: again and again the change that saves most among those that fit.

        From the most exact options when the given ones do not fit.
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
        """Prices at which some layer changes its option, rising."""
        found = []
        for i in range(self.costs.shape[1]):
            for j in range(i):
                both = self.there[:, i] & self.there[:, j]
                less = self.costs[both, j] - self.costs[both, i]
                more = self.squares[both, i] - self.squares[both, j]
                with np.errstate(all="ignore"):
                    found.append(less / more)
        prices = np.concatenate(found) if found else np.zeros(0)
        # Just above each: there the more exact of the two wins whatever the rounding.
        rising: Floats = np.unique(prices[np.isfinite(prices) & (prices > 0)]) * (1 + 1e-9)
        return rising

    def _order(self, first: Floats, then: Floats) -> Indices:
        tied = first == first.min(axis=1, keepdims=True)
        chosen: Indices = np.where(tied, then, np.inf).argmin(axis=1)
        return chosen


def _over_bins(table: Table, kept: npt.NDArray[np.bool_], bins: int) -> Indices:
    """The dynamic programme over the options that are kept."""
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
        # Rising in error, and only where more error saves cost.
        fitting.sort(key=lambda i: (extra[i], table.costs[row, i]))
        cost = (table.costs[row] - table.costs[row, fitting].min()).astype(np.float32)
        steps: list[tuple[int, int, np.float32]] = []
        for i in fitting:
            if not steps or cost[i] < steps[-1][2]:
                steps.append((int(i), int(np.ceil(extra[i])), cost[i]))
        moves.append(steps)
    # Single precision of what a layer costs beyond its least: half the memory to touch, 7 digits of a difference.
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


def most_exact(layers: Sequence[LayerOptions]) -> list[int]:
    """Each layer's option of least error, the cheapest of equals."""
    return [
        min(range(len(layer.options)), key=lambda i, layer=layer: (layer.errors[i], layer.costs[i]))  # type: ignore[misc]
        for layer in layers
    ]


def within(layers: Sequence[LayerOptions], chosen: Sequence[int], budget: float) -> bool:
    """Whether these options' total error is at most the budget."""
    return total_error(layer.errors[i] for layer, i in zip(layers, chosen, strict=True)) <= budget


def assigned(layers: Sequence[LayerOptions], chosen: Sequence[int], budget: float, policy: str) -> Assignment:
    """The assignment that these indices of options stand for."""
    picked = list(zip(layers, chosen, strict=True))
    error = total_error(layer.errors[i] for layer, i in picked)
    return Assignment(
        options={layer.name: layer.options[i] for layer, i in picked},
        cost=fsum(layer.costs[i] for layer, i in picked),
        error=error,
        policy=policy,
        met=error <= budget,
    )


def _index(layer: LayerOptions, option: int) -> int:
    if option not in layer.options:
        raise ValueError(f"{layer.name} has no option {option}, only {layer.options}")
    return layer.options.index(option)


def _align8(n: int) -> int:
    return -(-n // 8) * 8
