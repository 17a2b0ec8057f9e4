"""Policies that choose an option for every layer, behind one interface; `dynamic` is the exact one.

Each takes the layers and a budget that their most exact options are known to meet, and returns the index of an
option for every layer. All are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum, sqrt

import numpy as np
import numpy.typing as npt

from trimtab.planning.compression.dynamic_program import Table, dynamic
from trimtab.planning.compression.layer_options import (
    Assignment,
    LayerOptions,
    assigned,
    most_exact,
    total_error,
    within,
)

Policy = Callable[[Sequence[LayerOptions], float], list[int]]


def uniform(layers: Sequence[LayerOptions], budget: float) -> list[int]:
    """The same option everywhere: the cheapest one that fits, or every layer's most exact if none does."""
    common = set.intersection(*(set(layer.options) for layer in layers))
    each = ([layer.options.index(option) for layer in layers] for option in sorted(common))
    return _cheapest(layers, each, budget)


def linear(layers: Sequence[LayerOptions], budget: float) -> list[int]:
    """One option less for every halving of a layer's norm per value, from the cheapest start that fits.

    Norms per value are used so that two layers of one distribution get the same option whatever their sizes.
    """
    typical = np.array([layer.norm / sqrt(max(layer.numel, 1)) for layer in layers])
    with np.errstate(divide="ignore"):
        below = np.log2(typical / max(float(typical.max()), 1e-300))
    last = np.array([len(layer.options) - 1 for layer in layers])
    starts = np.arange(0.0, 3 * (int(last.max()) + 1), 0.125)
    wanted = np.rint(np.maximum(starts[:, None] + below, 0.0)).astype(np.intp)
    table = Table(layers, budget)
    each = [chosen for chosen in np.minimum(wanted, last) if table.spent(chosen) <= table.room]
    return _cheapest(layers, (chosen.tolist() for chosen in each), budget)


def kmeans(layers: Sequence[LayerOptions], budget: float) -> list[int]:
    """Layers of similar size and norm share an option: there are as many clusters as options.

    The dynamic program then chooses an option for each of the few clusters: ordering them by size and norm,
    as is usual, says which should get fewer bits but not how many fit the budget.
    """
    members: list[list[int]] = []
    for options in dict.fromkeys(layer.options for layer in layers):
        alike = [i for i, layer in enumerate(layers) if layer.options == options]
        labels = _clusters([layers[i] for i in alike], len(options))
        members += [[alike[j] for j in np.flatnonzero(labels == label)] for label in np.unique(labels)]
    merged = [_merged(str(n), [layers[i] for i in inside]) for n, inside in enumerate(members)]
    if not within(merged, most_exact(merged), budget):
        return most_exact(layers)
    chosen = [0] * len(layers)
    for inside, option in zip(members, dynamic(merged, budget), strict=True):
        for i in inside:
            chosen[i] = option
    return chosen


def search(
    layers: Sequence[LayerOptions], budget: float, seed: int = 0, generations: int = 120, population: int = 64
) -> list[int]:
    """Evolutionary search: assignments are crossed and mutated; those within the budget, then the cheapest, survive."""
    random = np.random.default_rng(seed)
    table = Table(layers, budget)
    rows, last = np.arange(len(layers)), np.array([len(layer.options) - 1 for layer in layers])
    start = [uniform(layers, budget), linear(layers, budget), most_exact(layers)]
    alive = np.array([start[i % len(start)] for i in range(population)])
    for _ in range(generations):
        mothers, fathers = alive[random.integers(population, size=(2, population))]
        children = np.where(random.random(mothers.shape) < 0.5, mothers, fathers)
        # About two layers per child: a change of many at once hardly ever fits the budget.
        struck = random.random(children.shape) < 2.0 / len(layers)
        children = np.clip(children + struck * random.choice((-1, 1), size=children.shape), 0, last)
        both = np.concatenate([alive, children])
        over = np.maximum(table.squares[rows, both].sum(axis=1) - table.room, 0.0)
        order = np.lexsort((table.costs[rows, both].sum(axis=1), over))
        alive = both[order[:population]]
    return _cheapest(layers, [table.fill(one).tolist() for one in (alive[0], *map(np.array, start))], budget)


POLICIES: Mapping[str, Policy] = {
    "dynamic": dynamic,
    "uniform": uniform,
    "linear": linear,
    "kmeans": kmeans,
    "search": search,
}


def choose_bits(layers: Sequence[LayerOptions], *, budget: float, policy: str = "dynamic") -> Assignment:
    """The cheapest assignment that the policy finds with a total error of at most `budget`.

    Args:
        budget: limit of the total error, usually `uniform_error(layers, 4)` or a little more.
        policy: a name in `POLICIES`: dynamic (exact up to its bins), uniform, linear, kmeans or search.
    """
    if policy not in POLICIES:
        raise ValueError(f"there is no policy {policy!r}; choose {', '.join(POLICIES)}")
    if not budget >= 0:
        raise ValueError(f"the error budget must be at least 0; got {budget}")
    if len({layer.name for layer in layers}) != len(layers):
        raise ValueError("two layers have the same name")
    exact = most_exact(layers)
    if not layers or not within(layers, exact, budget):
        return assigned(layers, exact, budget, policy)
    return assigned(layers, POLICIES[policy](layers, budget), budget, policy)


def _cheapest(layers: Sequence[LayerOptions], candidates: Iterable[list[int]], budget: float) -> list[int]:
    fitting = [chosen for chosen in candidates if within(layers, chosen, budget)]
    return min(
        fitting,
        key=lambda chosen: fsum(layer.costs[i] for layer, i in zip(layers, chosen, strict=True)),
        default=most_exact(layers),
    )


def _clusters(layers: Sequence[LayerOptions], k: int) -> npt.NDArray[np.intp]:
    """A label for every layer: k-means of (log size, log norm per value), each scaled by its standard deviation."""
    tiny = min((layer.norm for layer in layers if layer.norm > 0), default=1.0)
    size = np.log([max(layer.numel, 1) for layer in layers])
    norm = np.log([max(layer.norm, tiny * 1e-3) for layer in layers]) - size / 2
    points = np.stack([size, norm], axis=1)
    points = (points - points.mean(axis=0)) / np.maximum(points.std(axis=0), 1e-12)
    # Start from the middle; every next center is the point farthest from the existing ones.
    centers = points[[int(np.square(points).sum(axis=1).argmin())]]
    while len(centers) < min(k, len(points)):
        distance = np.square(points[:, None] - centers).sum(axis=2).min(axis=1)
        centers = np.concatenate([centers, points[[int(distance.argmax())]]])
    labels = np.zeros(len(points), dtype=np.intp)
    for _ in range(50):
        labels = np.square(points[:, None] - centers).sum(axis=2).argmin(axis=1)
        moved = np.stack(
            [
                points[labels == c].mean(axis=0) if (labels == c).any() else centers[c]
                for c in range(len(centers))
            ]
        )
        if np.array_equal(moved, centers):
            break
        centers = moved
    return labels


def _merged(name: str, layers: Sequence[LayerOptions]) -> LayerOptions:
    """Layers that share an option, as one layer."""
    choices = range(len(layers[0].options))
    return LayerOptions(
        name=name,
        numel=sum(layer.numel for layer in layers),
        norm=total_error(layer.norm for layer in layers),
        options=layers[0].options,
        errors=tuple(total_error(layer.errors[i] for layer in layers) for i in choices),
        costs=tuple(fsum(layer.costs[i] for layer in layers) for i in choices),
    )
