"""The project's one linear fit: seconds as a sum of two rates, by least squares in relative error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def two_rates(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(a, b) with a·x + b·y near the seconds of each (x, y, seconds); either may come out negative."""
    table = np.array(points, dtype=np.float64)
    relative = table[:, :2] / table[:, 2:]
    # In units near one: counts and bytes differ by many powers of ten.
    units = np.where(relative.max(axis=0) > 0, relative.max(axis=0), 1.0)
    solution = np.linalg.lstsq(relative / units, np.ones(len(table)), rcond=None)[0] / units
    return float(solution[0]), float(solution[1])


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(slope, offset) of seconds over size for (size, seconds); neither is negative."""
    slope, offset = two_rates([(size, 1.0, seconds) for size, seconds in points])
    if offset < 0:
        return _one_rate(points), 0.0
    if slope < 0:
        return 0.0, _one_rate([(1.0, seconds) for _, seconds in points])
    return slope, offset


def _one_rate(points: Sequence[tuple[float, float]]) -> float:
    relative = np.array([x / seconds for x, seconds in points])
    return float(relative.sum() / np.square(relative).sum())
