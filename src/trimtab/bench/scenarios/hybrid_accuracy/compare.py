"""Whether a method trains worse than fp32, and how sure that is.

The smallest change of a run, even another order of a sum, moves its result: with some seeds hardly, with others by more
than int8 does. So fp32 is trained several times with each seed, with changes that do no harm (the A/A rows), and a
method's gap is the distance of its run from their mean, seed by seed. What counts is the mean gap and its confidence
interval, the wider one of two:

- from the scatter of the method's own gaps over the seeds, which assumes nothing about where the scatter comes from;
- from that of the A/A rows, pooled over the seeds: a few gaps that happen to agree prove nothing where fp32's do not.

Both are Student's t, which knows how few the seeds are. A method whose runs diverge now and then scatters so much that
no interval would show it: diverged runs are counted, and one is enough to be worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import sqrt
from statistics import mean, stdev, variance
from typing import NamedTuple

import numpy as np

LEVEL = 0.005
"""How often a method that is as good as fp32 may be called worse by one measure: twice that by loss and accuracy."""

LEAST_NOISE = 1e-6
"""Nothing is measured more exactly, even if all gaps happen to agree."""

LEAST_GAIN = 0.5
"""Of what fp32 gains from training: a run that gains less has diverged."""

_POINTS = 20_001
"""That Student's distribution is summed at."""


class Gap(NamedTuple):
    """How much larger a method's figure is than fp32's."""

    mean: float
    low: float
    high: float
    """Ends of its confidence interval, each of which is missed with a probability of `LEVEL`."""


def gap_to(exact: Mapping[str, Sequence[float]], runs: Sequence[float], own: str = "") -> Gap:
    """The gap of a method's runs to those of fp32, both by seed.

    Args:
        exact: runs of fp32, and of its A/A rows.
        own: the method, if it is one of these, which is compared with the others.
    """
    others = [several for name, several in exact.items() if name != own]
    by_seed = list(zip(*others, strict=True))
    gaps = [run - mean(same_seed) for run, same_seed in zip(runs, by_seed, strict=True)]
    half = t_quantile(len(gaps) - 1) * stdev(gaps) / sqrt(len(gaps))
    if len(others) > 1:
        chance = sqrt(mean(variance(same_seed) for same_seed in by_seed) * (1 + 1 / len(others)))
        half = max(half, t_quantile(len(gaps) * (len(others) - 1)) * chance / sqrt(len(gaps)))
    half = max(half, LEAST_NOISE)
    return Gap(mean(gaps), mean(gaps) - half, mean(gaps) + half)


def diverged(losses: Sequence[float], untrained: Sequence[float], exact: Sequence[float]) -> int:
    """How many runs ended with less than `LEAST_GAIN` of what fp32 gains with that seed."""
    return sum(
        loss > start - LEAST_GAIN * (start - best)
        for loss, start, best in zip(losses, untrained, exact, strict=True)
    )


@cache
def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """What a variable with Student's distribution exceeds with a probability of `level`."""
    # With t = √ν·tan θ the density is that of cos θ to the power of ν - 1, on a bounded interval.
    angles = np.linspace(0, np.pi / 2, _POINTS)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    angle = np.interp((1 - 2 * level) * below[-1], below, angles)
    return float(sqrt(freedom) * np.tan(angle))
