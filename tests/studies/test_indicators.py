"""The study of indicators, small: its rows and rank correlations."""

from __future__ import annotations

import math

import pytest
from benchmarks.studies.indicators import indicator_rows, indicator_summary, spearman
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.support.requirements import requires

from trimtab.bench.harness import AA
from trimtab.measure.damage.indicators import INDICATORS
from trimtab.precision.devices import cpu_precisions


@requires(modules=["transformers", "sklearn"])
def test_every_indicator_has_its_row() -> None:
    done: list[tuple[int, int]] = []
    rows = indicator_rows(lambda *at: done.append(at), models=("resnet",), trained=4, batches=1)
    assert done == [(1, 1)]
    assert [row["indicator"] for row in rows] == [*INDICATORS, "measured" + AA]
    by = {row["indicator"]: row for row in rows}
    assert by["measured"]["correlation"] == pytest.approx(1)
    assert by["measured" + AA]["correlation"] > 0.6
    assert by["variance"]["correlation"] > 0.6
    assert ("correlation_int8" in by["variance"]) == ("int8" in cpu_precisions())
    assert by["variance"]["cost_steps"] < by["measured"]["cost_steps"]
    summary = indicator_summary(rows)
    assert summary["correlation"] == by["variance"]["correlation"]
    assert summary["best_alternative"] in ("depth", "curvature", "random")


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=20))
def test_rank_correlation(pairs: list[tuple[int, int]]) -> None:
    a, b = ([float(pair[i]) for pair in pairs] for i in (0, 1))
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert math.isnan(spearman(a, b))
    else:
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b)[0])
        assert spearman(a, [x**3 for x in a]) == pytest.approx(1)
