"""Water-filling: the best shares, within limits, checked against trying all."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.errors import TrimtabError
from trimtab.planning.tensor.shares import BlockSize, share_blocks, water_fill, water_level

TIMES = st.lists(st.floats(0.1, 10), min_size=1, max_size=3)


def last(counts: tuple[int, ...], times: list[float], fixed: list[float]) -> float:
    return max(f + t * n for f, t, n in zip(fixed, times, counts, strict=True))


@given(units=st.integers(0, 12), times=TIMES, data=st.data())
def test_no_other_shares_end_sooner(units: int, times: list[float], data: st.DataObject) -> None:
    ranks = len(times)
    fixed = data.draw(st.lists(st.floats(0, 20), min_size=ranks, max_size=ranks))
    most = data.draw(st.lists(st.none() | st.integers(0, 12), min_size=ranks, max_size=ranks))
    room = [units if limit is None else limit for limit in most]
    if sum(min(r, units) for r in room) < units:
        with pytest.raises(TrimtabError, match=f"{units} units do not fit"):
            water_fill(units, times, fixed=fixed, most=most)
        return
    shares = water_fill(units, times, fixed=fixed, most=most)
    assert sum(shares.counts) == units
    assert all(0 <= count <= limit for count, limit in zip(shares.counts, room, strict=True))
    assert shares.time == pytest.approx(last(shares.counts, times, fixed))
    possible = (
        counts
        for counts in itertools.product(*(range(min(r, units) + 1) for r in room))
        if sum(counts) == units
    )
    assert shares.time <= min(last(counts, times, fixed) for counts in possible) * (1 + 1e-9)
    if all(limit is None for limit in most):
        assert water_level(units, times, fixed) <= shares.time * (1 + 1e-9)


@given(units=st.integers(1, 5000), times=st.lists(st.floats(0.1, 10), min_size=2, max_size=5))
def test_multiples_cost_less_than_one_more_of_them(units: int, times: list[float]) -> None:
    shares = water_fill(units, times, multiple=16)
    assert sum(shares.counts) == units
    assert sum(count % 16 != 0 for count in shares.counts) <= 1
    fixed = [0.0] * len(times)
    assert shares.time <= water_level(units, times, fixed) + 16 * max(times)


@pytest.mark.parametrize(("slowdown", "ideal"), [(2, 1.067), (4, 1.103), (8, 1.123)])
def test_one_straggler_of_eight(slowdown: float, ideal: float) -> None:
    """Known ideals: 8 ranks, one slower, time relative to eight equal ones."""
    units = 80_000
    shares = water_fill(units, [slowdown, *[1.0] * 7])
    assert shares.time / (units / 8) == pytest.approx(ideal, abs=1e-3)


def test_an_infinitely_slow_rank_gets_nothing() -> None:
    assert water_fill(10, [math.inf, 1.0]).counts == (0, 10)


@pytest.mark.parametrize(
    ("units", "times", "fixed", "said"),
    [
        (4, [], None, "cannot be shared"),
        (4, [1.0], [0.0, 0.0], "cannot be shared"),
        (4, [0.0, 1.0], None, "above 0"),
        (4, [math.nan, 1.0], None, "above 0"),
        (4, [1.0, 1.0], [math.inf, 0.0], "finite"),
    ],
)
def test_wrong_input_is_refused(units: int, times: list[float], fixed: list[float] | None, said: str) -> None:
    with pytest.raises(TrimtabError, match=said):
        water_fill(units, times, fixed=fixed)


def test_blocks_are_shared_by_speed_within_memory() -> None:
    blocks = {"mlp": BlockSize(units=4096, unit_bytes=10), "attention": BlockSize(units=12, unit_bytes=1000)}
    assert share_blocks(blocks, [3, 1]) == {"mlp": (3072, 1024), "attention": (9, 3)}
    whole = 4096 * 10 + 12 * 1000
    limited = share_blocks(blocks, [3, 1], memory_bytes=[whole / 2, None])
    assert limited == {"mlp": (2048, 2048), "attention": (6, 6)}
    with pytest.raises(TrimtabError, match="mlp: tensor shares: 4096 units do not fit"):
        share_blocks(blocks, [1, 1], memory_bytes=[whole / 4, whole / 2])


def test_a_rank_of_no_speed_gets_nothing() -> None:
    assert share_blocks({"mlp": BlockSize(units=64, unit_bytes=1)}, [0, 2]) == {"mlp": (0, 64)}
    with pytest.raises(TrimtabError, match="one above 0"):
        share_blocks({"mlp": BlockSize(units=64, unit_bytes=1)}, [0, 0])
