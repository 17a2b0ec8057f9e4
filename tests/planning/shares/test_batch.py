"""Batch shares: the best there are, within memory, and steady where nothing changes."""

from __future__ import annotations

from itertools import pairwise, product
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trimtab.errors import TrimtabError
from trimtab.planning.shares.batch import (
    Adjust,
    Run,
    _halfway,
    fixed_seconds,
    noise_of,
    rebalance,
    share_batch,
    shrink,
    without_waiting,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TIME = st.floats(0.01, 10.0)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_other_shares_end_earlier(data: st.DataObject) -> None:
    ranks, total = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 9))
    per_sample = data.draw(st.lists(TIME, min_size=ranks, max_size=ranks))
    fixed = data.draw(st.lists(st.floats(0, 10), min_size=ranks, max_size=ranks))
    most = data.draw(st.lists(st.none() | st.integers(0, 9), min_size=ranks, max_size=ranks))
    least = data.draw(st.integers(0, 2))
    base = min(least, total // ranks)

    def time(counts: Sequence[int]) -> float:
        return max(o + t * n for o, t, n in zip(fixed, per_sample, counts, strict=True))

    rooms = [range(base, (total if limit is None else min(total, limit)) + 1) for limit in most]
    feasible = [counts for counts in product(*rooms) if sum(counts) == total]
    if not feasible:
        with pytest.raises(TrimtabError, match="does not fit"):
            share_batch(total, per_sample, fixed=fixed, most=most, least=least)
        return
    found = share_batch(total, per_sample, fixed=fixed, most=most, least=least)
    assert found in feasible
    assert time(found) <= min(map(time, feasible)) * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.floats(0, 1))
def test_a_smaller_batch_asks_nobody_for_more(shares: list[int], part: float) -> None:
    total = int(sum(shares) * part)
    smaller = shrink(total, shares)
    assert sum(smaller) == total
    assert all(a <= b for a, b in zip(smaller, shares, strict=True))


def test_shares_follow_speed() -> None:
    assert share_batch(28, [1, 2.5]) == (20, 8)
    assert share_batch(21, [1, 1 / 0.7, 1 / 0.4]) == (10, 7, 4)
    assert share_batch(28, [1, 2.5], most=[12, None]) == (12, 16)
    assert share_batch(4, [1, 1000]) == (3, 1)
    assert share_batch(1, [1000, 1]) == (0, 1)


def run(
    pace: Callable[[int, int, int], float],
    ranks: int,
    total: int,
    windows: int,
    rule: Adjust,
    known: Sequence[float] | None = None,
) -> list[tuple[int, ...]]:
    """The shares of each window, where rank r takes pace(window, r, samples) seconds for a step."""
    shares = share_batch(total, [1.0] * ranks)
    history: list[tuple[int, ...]] = []
    runs = [Run(shares=shares, windows=[])]
    for window in range(windows):
        history.append(shares)
        runs[-1].windows.append([pace(window, rank, n) for rank, n in enumerate(shares)])
        noise = noise_of([each.windows for each in runs])
        fixed = fixed_seconds(runs, noise=noise, known=known)
        new = rebalance(runs, rule, noise=noise, fixed=fixed)
        if new is not None:
            shares = new
            runs.append(Run(shares=shares, windows=[]))
    return history


def moves(history: list[tuple[int, ...]]) -> int:
    return sum(a != b for a, b in pairwise(history))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 40), st.floats(0.5, 5)), min_size=2, max_size=4))
def test_reaches_equal_times_whatever_is_fixed(model: list[tuple[float, float]]) -> None:
    """And then stays: within what moving a sample, or the rule's gain, would change."""
    rule, total = Adjust(), 64
    history = run(lambda _, r, n: model[r][0] + model[r][1] * n, len(model), total, 60, rule)
    assert history[-1] == history[-10]
    times = [o + t * n for (o, t), n in zip(model, history[-1], strict=True)]
    best = share_batch(total, [t for _, t in model], fixed=[o for o, _ in model])
    floor = max(o + t * n for (o, t), n in zip(model, best, strict=True))
    # Moving a sample must count for more than `gain`, so one more than the best may remain on a rank.
    assert max(times) <= floor * rule.gain + 2 * max(t for _, t in model)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.5, 5)), min_size=2, max_size=4))
def test_one_move_is_enough_where_the_fixed_part_is_known(model: list[tuple[float, float]]) -> None:
    fixed, each = [o for o, _ in model], [t for _, t in model]
    history = run(lambda _, r, n: fixed[r] + each[r] * n, len(model), 64, 12, Adjust(), known=fixed)
    assert moves(history) <= 1
    best = share_batch(64, each, fixed=fixed)

    def seconds(shares: Sequence[int]) -> float:
        return max(o + t * n for o, t, n in zip(fixed, each, shares, strict=True))

    if seconds(history[0]) >= Adjust().gain * seconds(best):
        assert seconds(history[-1]) == pytest.approx(seconds(best))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0.5, 5)), min_size=2, max_size=4),
    st.floats(0, 0.01),
    st.integers(0, 99),
)
def test_few_moves_are_enough_where_it_must_be_learned(
    model: list[tuple[float, float]], sigma: float, seed: int
) -> None:
    source = Random(seed)

    def pace(_: int, rank: int, n: int) -> float:
        return (model[rank][0] + model[rank][1] * n) * source.lognormvariate(0, sigma)

    history = run(pace, len(model), 64, 40, Adjust())
    assert moves(history[:10]) <= 4
    assert moves(history[10:]) <= 1


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_more_is_taken_for_fixed_than_is(data: st.DataObject) -> None:
    """Nor than what is known, where times are exact and speeds are steady; whatever shares were seen."""
    ranks = data.draw(st.integers(2, 4))
    model = data.draw(st.lists(st.tuples(st.floats(0, 5), st.floats(0.5, 5)), min_size=ranks, max_size=ranks))
    sizes = st.lists(st.integers(1, 32), min_size=ranks, max_size=ranks)
    runs = [
        Run(shares=tuple(shares), windows=[[a + b * n for (a, b), n in zip(model, shares, strict=True)]] * 2)
        for shares in data.draw(st.lists(sizes, min_size=1, max_size=4))
    ]
    noise = data.draw(st.floats(0, 0.2))
    learned = fixed_seconds(runs, noise=noise)
    assert all(0 <= own <= a + 1e-9 * (1 + a + 32 * b) for own, (a, b) in zip(learned, model, strict=True))
    assert fixed_seconds(runs, noise=float("inf")) == (0.0,) * ranks


def test_a_rank_that_slows_down_has_not_become_fixed() -> None:
    before, after = [[16.0, 16.0]], [[20.0, 30.0]]
    runs = [Run(shares=(16, 16), windows=before), Run(shares=(20, 12), windows=after)]
    assert fixed_seconds(runs, noise=0.0) == (0.0, 0.0), "fewer samples cannot take longer at the same speed"


def test_a_slowed_rank_loses_work_and_gets_it_back() -> None:
    def pace(window: int, rank: int, n: int) -> float:
        slow = rank == 1 and 10 <= window < 30
        return 3 + n * (2.5 if slow else 1.0)

    history = run(pace, 2, 32, 50, Adjust())
    assert history[9] == (16, 16)
    assert history[12] in [(22, 10), (23, 9)]
    assert abs(history[29][1] - 9) <= 1
    assert history[33][1] >= 14
    assert abs(history[49][1] - 16) <= 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(0.99, 1.01), min_size=3, max_size=3), min_size=40, max_size=40))
def test_noise_moves_nothing(noise: list[list[float]]) -> None:
    history = run(lambda w, r, n: n * noise[w][r], 3, 96, 40, Adjust())
    assert set(history) == {(32, 32, 32)}


@pytest.mark.parametrize("sigma", [0.03, 0.1, 0.25])
@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 0.6, 1.5, 1.0)])
def test_shares_settle_on_a_noisy_machine(sigma: float, speeds: tuple[float, ...]) -> None:
    late = []
    for seed in range(12):
        source = Random(seed)

        def pace(_: int, rank: int, n: int, source: Random = source) -> float:
            return n * speeds[rank] * source.lognormvariate(0, sigma)

        history = run(pace, len(speeds), 16 * len(speeds), 120, Adjust())
        assert moves(history) <= 8
        late.append(moves(history[60:]))
        last = [n * speed for n, speed in zip(history[-1], speeds, strict=True)]
        assert max(last) / (sum(last) / len(last)) < 1.1 + 2 * sigma, "they settle where the ranks are even"
    assert max(late) <= 4
    assert sum(late) <= len(late)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(4, 60), st.floats(1.1, 3), st.floats(0.5, 2), st.sampled_from([0.0, 0.02]), st.integers(0, 9)
)
@example(32, 1.4375, 1.4375, 0.02, 0)
@example(27, 2.1593931073980692, 1.4375, 0.02, 8)
def test_shares_settle_where_times_jump(
    edge: int, jump: float, speed: float, sigma: float, seed: int
) -> None:
    """A rank whose time jumps at some number of samples has no shares with equal times on either side of it."""
    source = Random(seed)

    def pace(_: int, rank: int, n: int) -> float:
        own = n * (jump if n > edge else 1) if rank == 0 else n * speed
        return own * source.lognormvariate(0, sigma)

    history = run(pace, 2, 64, 150, Adjust())
    assert moves(history) <= 12
    assert moves(history[100:]) <= 4


@pytest.mark.parametrize("sigma", [0.0, 0.02])
def test_what_was_slower_is_tried_again_when_speeds_have_changed(sigma: float) -> None:
    """With more than 32 samples rank 0 took longer; later it does not, and rank 1 is slow."""
    source = Random(0)

    def pace(window: int, rank: int, n: int) -> float:
        own = (
            n * (1.4375 if n > 32 and window < 80 else 1) if rank == 0 else n * (1.4375 if window < 80 else 2)
        )
        return own * source.lognormvariate(0, sigma)

    history = run(pace, 2, 64, 150, Adjust())
    assert abs(history[79][0] - 32) <= 1
    assert abs(history[-1][0] - 43) <= 1, history[80:]


def test_a_rank_that_slows_down_after_a_correction_loses_samples_soon() -> None:
    """Measured on a throttled rank: the correction held the next move back until old windows decided it wrongly."""
    quiet = [[32.0, 31.0], [32.0, 32.0], [33.0, 32.0]]
    before = [
        Run(shares=(256, 256), windows=[[23.0, 53.0]]),
        Run(shares=(358, 154), windows=[[35.0, 27.0]] * 2),
    ]
    slowed = Run(shares=(347, 165), windows=[*quiet, [32.0, 90.0], [32.0, 90.0]])
    new = rebalance([*before, slowed], Adjust(), noise=0.02)
    assert new is not None
    assert new[1] < 90, "what 90 ms for 165 samples and 32 ms for 347 ask for"


def test_a_rank_that_slows_down_just_when_shares_move_loses_samples_soon() -> None:
    """No window tells what the new shares took before: but with fewer samples nothing takes longer by itself."""
    runs = [
        Run(shares=(256, 256), windows=[[27.0, 65.0]]),
        Run(shares=(363, 149), windows=[[32.0, 26.0]] * 3),
        Run(shares=(337, 175), windows=[[30.0, 36.0]] * 4),
        Run(shares=(348, 164), windows=[[30.0, 79.0], [30.0, 84.0]]),
    ]
    new = rebalance(runs, Adjust(), noise=0.02)
    assert new is not None
    assert new[1] < 90


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6), st.integers(0, 99)
)
def test_halfway_lies_between(pairs: list[tuple[int, int]], seed: int) -> None:
    before = [a for a, _ in pairs]
    after = list(before)
    source = Random(seed)
    for _ in range(sum(b for _, b in pairs)):
        giver, taker = source.randrange(len(after)), source.randrange(len(after))
        if after[giver]:
            after[giver] -= 1
            after[taker] += 1
    half = _halfway(before, after)
    assert sum(half) == sum(before)
    assert all(min(a, b) <= h <= max(a, b) for a, h, b in zip(before, half, after, strict=True))
    assert all(abs(2 * h - a - b) <= 1 for a, h, b in zip(before, half, after, strict=True))


def test_noise_does_not_hide_a_change() -> None:
    source = Random(0)

    def pace(window: int, rank: int, n: int) -> float:
        return n * (2.0 if rank == 0 and window >= 40 else 1.0) * source.lognormvariate(0, 0.05)

    history = run(pace, 4, 64, 60, Adjust())
    assert max(history[39]) - min(history[39]) <= 2
    assert history[50][0] <= 11, "the even share would be 16 / 1.75"


def test_bursts_do_not_move_shares_back_and_forth() -> None:
    source = Random(0)

    def pace(_window: int, _rank: int, n: int) -> float:
        return n * source.lognormvariate(0, 0.05) * (2 if source.random() < 0.1 else 1)

    assert moves(run(pace, 2, 32, 100, Adjust())) <= 12


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((8, []), "one entry for each rank"),
        ((8, [1.0, 0.0]), "above 0"),
        ((8, [1.0, float("inf")]), "finite"),
    ],
)
def test_refuses_what_makes_no_sense(arguments: tuple[int, list[float]], said: str) -> None:
    with pytest.raises(TrimtabError, match=said):
        share_batch(*arguments)
    with pytest.raises(TrimtabError, match="gain above 1"):
        Adjust(gain=0.9)


def test_a_backward_pass_that_waiting_collectives_slow_down_is_told_by_its_forward_pass() -> None:
    # As on a half and a quarter of a GPU: both take 0.19 s, and alone 0.11 and 0.19.
    corrected = without_waiting((0.19, 0.19), (0.01, 0.01), (0.03, 0.06))
    assert corrected == pytest.approx((0.01 + 0.03 * 3, 0.19))
    assert rebalance([Run(shares=(8, 8), windows=[list(corrected)] * 3)], Adjust()) == (11, 5)
    assert without_waiting((0.19, 0.19), (0.01, 0.01), (0.0, 0.0)) == (0.19, 0.19), "not known, as on CPUs"
    assert without_waiting((0.1, 0.2), (0.0, 0.0), (0.1, 0.2)) == (0.1, 0.2)
