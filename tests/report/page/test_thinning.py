"""Thinning hides nothing: means by weight, and every extreme is kept."""

from __future__ import annotations

import pytest

from trimtab.report.page.thinning import Samples, thinned


def test_short_series_are_kept_as_they_are() -> None:
    assert thinned(Samples(([1, 2],), [0.5, None]), 2) == {"x": [[1.0, 2.0]], "y": [0.5, None]}


def test_extremes_survive() -> None:
    values = [1.0] * 9_999
    values[4_321], values[7_000] = 50.0, -3.0
    series = thinned(Samples((range(9_999),), values), 100)
    assert len(series["y"]) == len(series["x"][0]) == 100
    assert max(series["high"]) == 50.0
    assert min(series["low"]) == -3.0
    assert series["x"][0][-1] == 9_998


def test_means_are_by_weight() -> None:
    series = thinned(Samples(([1, 2, 34, 66],), [10.0, 10.0, 1.0, 1.0], [1.0, 3.0, 32.0, 96.0]), 2)
    assert series["y"] == [10.0, 1.0]
    whole = thinned(Samples(([1, 33],), [33.0, 0.0], [1.0, 32.0]), 1)
    assert whole["y"] == [pytest.approx(1.0)]


def test_a_run_without_numbers_is_a_gap() -> None:
    series = thinned(Samples((range(6),), [1.0, 1.0, float("nan"), "inf", 2.0, 10**400]), 3)
    assert series["y"] == [1.0, None, 2.0]
    assert series["low"] == [1.0, None, 2.0]
