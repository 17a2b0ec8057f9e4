"""Fewer points for long series, with nothing hidden: each point keeps the mean, the lowest and the highest value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from trimtab.report.page.values import mean, number


@dataclass(frozen=True)
class Samples:
    """One series: several x axes for the same values, and how many steps each value stands for."""

    xs: tuple[Sequence[Any], ...]
    ys: Sequence[Any]
    weights: Sequence[float] | None = None


def thinned(samples: Samples, most: int) -> dict[str, Any]:
    """The `x`, `y` and, where values were merged, `low` and `high` of a chart's series with at most `most` points.

    Values are merged in runs of equal length: y is their mean by weight, x that of the last, low and high their
    extremes. A run without any number is a gap.
    """
    count = len(samples.ys)
    if count <= most:
        return {"x": [list(map(number, xs)) for xs in samples.xs], "y": list(map(number, samples.ys))}
    edges = [count * at // most for at in range(most + 1)]
    runs = [slice(start, end) for start, end in pairwise(edges)]
    known = [[value for value in map(number, samples.ys[run]) if value is not None] for run in runs]
    weights = samples.weights
    return {
        "x": [[number(xs[run.stop - 1]) for run in runs] for xs in samples.xs],
        "y": [mean(samples.ys[run], None if weights is None else weights[run]) for run in runs],
        "low": [min(values, default=None) for values in known],
        "high": [max(values, default=None) for values in known],
    }
