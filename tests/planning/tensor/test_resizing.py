"""Choosing what to leave out: the lowest scores, nothing for long, never everything."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import TrimtabError
from trimtab.planning.tensor.resizing import Pool, choose, even_counts, pooled_counts


def pool(scores: list[float], waited: list[int] | None = None, cost: float = 1.0) -> Pool:
    return Pool(
        scores=np.array(scores, dtype=np.float64),
        waited=np.array(waited or [0] * len(scores), dtype=np.int64),
        cost=cost,
    )


def test_the_lowest_go() -> None:
    assert choose(pool([3, 1, 2, 0, 5]), 2).tolist() == [False, True, False, True, False]


def test_what_is_not_known_is_not_left_out_before_what_is() -> None:
    assert choose(pool([math.nan, 9, 8, math.nan]), 2).tolist() == [False, True, True, False]
    assert choose(pool([math.nan, 9, 8, math.nan]), 3).sum() == 3


def test_the_longest_away_come_back_and_only_as_many_as_must() -> None:
    left = choose(pool([0, 0, 0, 0, 9, 9, 9, 9], [1, 4, 2, 3, 0, 0, 0, 0]), 4, returns=4)
    assert not left[1], "it was away longest"
    assert left[[0, 2, 3]].all(), "these have lower scores and wait less"


@given(
    st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))),
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_all_return_within_the_bound(sizes: tuple[int, int], returns: int, seed: int, stubborn: bool) -> None:
    """Whatever the scores do; with scores that never change (`stubborn`) only ageing can bring anything back."""
    total, count = sizes
    source = np.random.default_rng(seed)
    waited = np.zeros(total, dtype=np.int64)
    fixed = source.random(total)
    # When most are left out, so many cannot take turns faster than the few places allow.
    bound = max(returns, math.ceil(count / (total - count)))
    for _ in range(3 * bound + 5):
        scores = fixed if stubborn else source.random(total)
        left = choose(Pool(scores=scores, waited=waited, cost=1.0), count, returns)
        assert left.sum() == count
        waited = np.where(left, waited + 1, 0)
        assert waited.max(initial=0) <= bound


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=5), st.floats(0, 0.99), st.integers(0, 99))
def test_counts_leave_something_of_every_layer(sizes: list[int], ratio: float, seed: int) -> None:
    source = np.random.default_rng(seed)
    pools = {
        str(i): Pool(scores=source.random(n), waited=np.zeros(n, dtype=np.int64), cost=1.0 + i)
        for i, n in enumerate(sizes)
    }
    for counts in (even_counts(pools, ratio), pooled_counts(pools, ratio)):
        for name, each in pools.items():
            assert 0 <= counts[name] < len(each.scores)
    for name, each in pools.items():
        off = abs(even_counts(pools, ratio)[name] - ratio * len(each.scores))
        assert off <= max(1.0, len(each.scores) / 60), "rounding costs little"


def test_widths_suit_matrix_hardware() -> None:
    counts = even_counts({"wide": pool([1.0] * 4096), "heads": pool([1.0] * 12)}, 0.45)
    assert (4096 - counts["wide"]) % 64 == 0
    assert counts["heads"] == 5


def test_pooled_scores_take_more_from_where_less_is_missed() -> None:
    flat, steep = [1.0] * 32, [0.1] * 24 + [3.7] * 8
    counts = pooled_counts({"flat": pool(flat), "steep": pool(steep)}, 0.25)
    assert counts == {"flat": 0, "steep": 16}
    assert sum(pooled_counts({"flat": pool(flat), "steep": pool(steep)}, 0.5).values()) == 32


def test_no_layer_loses_more_than_the_cap() -> None:
    low, high = pool([0.0] * 31 + [1.0]), pool([1.0] * 32)
    assert pooled_counts({"low": low, "high": high}, 0.5, cap=0.6)["low"] <= 20
    assert pooled_counts({"low": low, "high": high}, 0.5, cap=0.6)["high"] >= 12
    assert pooled_counts({"low": low}, 0.9, cap=0.6)["low"] >= 28, "what is asked of all is not capped"


def test_dear_units_count_for_what_they_are() -> None:
    dear, cheap = pool([0.5, 1, 1.5, 1], cost=8.0), pool([1.0] * 32, cost=1.0)
    counts = pooled_counts({"dear": dear, "cheap": cheap}, 0.25)
    assert counts["dear"] * 8 + counts["cheap"] == pytest.approx(16, abs=1)


@pytest.mark.parametrize("ratio", [-0.1, 1.0, math.nan])
def test_a_ratio_that_is_no_part_is_refused(ratio: float) -> None:
    with pytest.raises(TrimtabError, match="from 0 to below 1"):
        even_counts({"a": pool([1.0])}, ratio)
