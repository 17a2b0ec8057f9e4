"""The linear fit: exact on lines, never negative, and as the normal equations have it."""

from __future__ import annotations

import pytest

from trimtab.predict.linear_fit import fit_line, two_rates


def test_a_line_through_points() -> None:
    slope, offset = fit_line([(n, 3e-9 * n + 2e-6) for n in (1 << 10, 1 << 14, 1 << 20)])
    assert slope == pytest.approx(3e-9)
    assert offset == pytest.approx(2e-6)
    assert fit_line([(1000, 1e-6), (2000, 3e-6)])[1] == 0
    assert fit_line([(1000, 3e-6), (2000, 1e-6)])[0] == 0


def test_it_minimizes_the_relative_error() -> None:
    points = [(2, 1e4, 1e-4), (2, 1e6, 8e-3), (6, 3e7, 0.3), (6, 9e7, 0.7)]
    best = two_rates(points)

    def error(message: float, byte: float) -> float:
        return sum(((message * m + byte * v) / s - 1) ** 2 for m, v, s in points)

    for change in (0.999, 1.001):
        assert error(*best) < error(best[0] * change, best[1])
        assert error(*best) < error(best[0], best[1] * change)
