"""Which units or columns a rank leaves out of its products for a window of steps. Pure functions.

Those with the lowest scores are left out, and those left out longest return in turn, a few each
window: so nothing is left out for more than a bounded number of windows, and returning ones never displace all of
the important ones at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.errors import TrimtabError
from trimtab.planning.tensor.shares import hardware_multiple

RETURN = 16
"""Most windows that anything is left out, while the number left out stays the same."""

_CAP = 0.75
"""Largest fraction of a layer that pooled scores may leave out, unless the ratio itself is larger."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool:
    """The units or columns of one layer on this rank, from which some are left out."""

    scores: NDArray[np.float64]
    """Importance of each; NaN while unknown, and those are left out last."""

    waited: NDArray[np.int64]
    """Windows in a row that each has been left out."""

    cost: float
    """Work of one of them, in any unit that all layers share."""


def check_ratio(ratio: float) -> None:
    """Refuse a ratio that is not a fraction from 0 to below 1."""
    if not 0 <= ratio < 1:  # also NaN
        raise TrimtabError(
            f"resize: ratio={ratio:g} is not a valid fraction of the work to leave out; give one from 0 to below 1"
        )


def even_counts(pools: Mapping[str, Pool], ratio: float) -> dict[str, int]:
    """How many to leave out of each layer: the same fraction of all."""
    check_ratio(ratio)
    return {name: _rounded(len(pool.scores), ratio * len(pool.scores)) for name, pool in pools.items()}


def pooled_counts(pools: Mapping[str, Pool], ratio: float, cap: float = _CAP) -> dict[str, int]:
    """How many to leave out of each layer, so that the lowest scores of all layers are left out.

    Scores are compared after division by their layer's mean. No layer loses more than `cap` of its own, or
    more than `ratio` if that is higher. Together they lose `ratio` of the work, up to rounding.
    """
    check_ratio(ratio)
    names = list(pools)
    scores = [_normalized(pools[name].scores) for name in names]
    layer = np.repeat(np.arange(len(names)), [len(each) for each in scores])
    order = np.argsort(np.concatenate([*scores, np.empty(0)]), kind="stable")
    costs = np.array([pools[name].cost for name in names])
    budget = ratio * sum(len(each) * cost for each, cost in zip(scores, costs, strict=True))
    most = [math.floor(max(cap, ratio) * len(each)) for each in scores]
    counts = [0] * len(names)
    for index in layer[order]:
        if counts[index] < most[index] and costs[index] <= budget:
            counts[index] += 1
            budget -= costs[index]
    return {name: _rounded(len(each), count) for name, each, count in zip(names, scores, counts, strict=True)}


def choose(pool: Pool, count: int, returns: int = RETURN) -> NDArray[np.bool_]:
    """Which `count` to leave out: the lowest scores, except for those left out longest, of which enough return.

    With the same count each time, none is left out for more than `returns` windows in a row.
    """
    total = len(pool.scores)
    assert 0 <= count < max(1, total), (count, total)
    turn = min(math.ceil(count / returns), total - count)
    away = np.flatnonzero(pool.waited > 0)
    back = away[np.argsort(-pool.waited[away], kind="stable")][:turn]
    score = np.where(np.isnan(pool.scores), np.inf, pool.scores)
    score[back] = np.inf
    # Among equals those already left out stay out, so that the others continue to learn.
    place = np.lexsort((np.where(pool.waited > 0, 0, 1), score))
    place = place[~np.isin(place, back)][:count]
    left = np.zeros(total, dtype=np.bool_)
    left[place] = True
    return left


def _normalized(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    known = scores[~np.isnan(scores)]
    mean = known.mean() if known.size and known.mean() > 0 else 1.0
    divided: NDArray[Any] = np.where(np.isnan(scores), np.inf, scores / mean)
    return divided


def _rounded(total: int, left: float) -> int:
    """An integer to leave out, such that the rest suits matrix hardware and is at least one."""
    multiple = hardware_multiple(total)
    kept = round((total - left) / multiple) * multiple
    return total - min(total, max(1, kept)) if left > 0 else 0
