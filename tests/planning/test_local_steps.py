"""The choice of local steps: as short a round as the wire allows, within the penalty, or none at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.local.fragments import turns
from trimtab.local_settings import LocalSettings
from trimtab.planning.local_steps import (
    SLOWER,
    WIRE_PART,
    choose_local_steps,
    every_step_seconds,
    local_settings,
    longest_round,
    of_one_step,
    outer_rates,
    penalty,
)

seconds = st.floats(1e-3, 100.0)


def test_the_round_is_as_short_as_the_wire_allows() -> None:
    choice = choose_local_steps(
        step_s=0.34, exchange_s={4: 10.0, 2: 5.0}, every_step_s=10.34, workers=2, layers=50
    )
    assert choice.settings is not None
    assert choice.settings.bits == 4, "more bits where they fit"
    assert choice.settings.every == 35, "10 s of exchange in 0.85 of 35 steps of 0.34 s"
    assert choice.step_s == 0.34
    assert 0 < choice.penalty <= 0.01


def test_fewer_bits_where_the_round_would_be_too_long() -> None:
    choice = choose_local_steps(
        step_s=0.34, exchange_s={4: 60.0, 2: 30.0}, every_step_s=60.0, workers=2, layers=50
    )
    assert choice.settings is not None
    assert choice.settings.bits == 2
    assert choice.settings.every <= longest_round(2, 0.01, 2)
    assert choice.penalty <= 0.01


def test_bits_are_those_with_the_lower_expected_penalty() -> None:
    """Long rounds cost more than coarse changes do."""
    choices = [
        choose_local_steps(
            step_s=0.45,
            exchange_s={4: wire, 2: wire / 2},
            every_step_s=wire,
            workers=2,
            layers=50,
            max_penalty=0.02,
        )
        for wire in (12.0, 70.0)
    ]
    assert [choice.settings and choice.settings.bits for choice in choices] == [4, 2]
    assert all(choice.step_s == 0.45 for choice in choices), "neither waits for the wire"


def simulated_step_s(settings: LocalSettings, step_s: float, exchange_s: float, work_s: float) -> float:
    """Steps and fragments one by one: the wire carries one at a time, and a worker waits for a late one."""
    turn_of = turns(settings.every, settings.fragments)
    now = free = 0.0
    under_way: dict[int, tuple[int, float]] = {}
    ends = []
    for step in range(6 * settings.every):
        now += step_s + work_s / settings.every
        for fragment, turn in enumerate(turn_of):
            is_turn = step % settings.every + 1 == turn
            sent, arrives = under_way.get(fragment, (step, 0.0))
            if is_turn or step == sent + settings.delay:
                now = max(now, arrives)
                under_way.pop(fragment, None)
            if is_turn:
                free = max(free, now) + exchange_s / settings.fragments
                under_way[fragment] = step, free
        ends.append(now)
    return (ends[-1] - ends[2 * settings.every - 1]) / (4 * settings.every)


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("step_s", [0.06, 0.34, 0.45])
@pytest.mark.parametrize("wire_s", [1.0, 5.0, 12.0, 40.0])
def test_predicted_steps_are_those_of_a_simulation(workers: int, step_s: float, wire_s: float) -> None:
    """A hundred, ten and fewer Mbit/s: also where workers wait for the wire."""
    exchange_s = {4: wire_s, 2: wire_s * 2.5 / 4.5}
    choice = choose_local_steps(
        step_s=step_s,
        exchange_s=exchange_s,
        every_step_s=100.0,
        workers=workers,
        layers=50,
        work_s=0.25,
    )
    assert choice.settings is not None
    simulated = simulated_step_s(choice.settings, step_s, exchange_s[choice.settings.bits or 0], 0.25)
    assert choice.step_s == pytest.approx(simulated, rel=0.01)


def test_where_every_step_is_fast_enough_it_stays() -> None:
    choice = choose_local_steps(
        step_s=1.0, exchange_s={4: 0.1, 2: 0.05}, every_step_s=1.04, workers=4, layers=5
    )
    assert choice.settings is None
    assert "would gain nothing" in choice.reason


@given(seconds, seconds, seconds, st.integers(2, 64), st.floats(1e-3, 0.1))
def test_the_choice_keeps_its_limits(
    step_s: float, four: float, extra: float, workers: int, max_penalty: float
) -> None:
    choice = choose_local_steps(
        step_s=step_s,
        exchange_s={4: four, 2: four / 2},
        every_step_s=step_s + extra,
        workers=workers,
        layers=20,
        max_penalty=max_penalty,
    )
    if choice.settings is None:
        assert choice.step_s == step_s + extra
        return
    assert choice.penalty <= max_penalty or choice.settings.every == 2, "a round has at least two steps"
    assert choice.step_s <= step_s + extra
    assert step_s + extra > SLOWER * step_s
    exchange = {4: four, 2: four / 2}[choice.settings.bits or 0]
    waits = exchange > WIRE_PART * step_s * choice.settings.every
    assert not waits or choice.settings.every == longest_round(workers, max_penalty, choice.settings.bits)


@given(st.integers(2, 200), st.integers(2, 100))
def test_the_penalty_grows_with_workers_and_rounds(workers: int, every: int) -> None:
    assert penalty(workers + 1, every) >= penalty(workers, every) > 0
    assert penalty(workers, every + 1) >= penalty(workers, every)
    assert penalty(1, every) == 0
    assert penalty(workers, every, 2) > penalty(workers, every, 4) == penalty(workers, every, None)


@given(st.integers(2, 64), st.integers(2, 100), st.floats(0, 1), st.floats(0, 1))
def test_the_penalty_grows_where_workers_agree_less(
    workers: int, every: int, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    assert penalty(workers, every, 4, low) >= penalty(workers, every, 4, high) >= penalty(workers, every)
    assert longest_round(workers, 0.01, 4, low) <= longest_round(workers, 0.01, 4, high)


@given(st.floats(0, 1), st.integers(1, 200))
def test_agreement_of_a_step_is_that_of_the_round_it_is_part_of(of_a_step: float, steps: int) -> None:
    common, noise = steps**2 * of_a_step, steps * (1 - of_a_step)
    assert of_one_step(common / (common + noise), steps) == pytest.approx(of_a_step, abs=1e-9)


@pytest.mark.parametrize(("agreement", "every"), [(None, 35), (0.4, 35), (0.38, 32), (0.005, None)])
def test_rounds_become_shorter_where_workers_agree_less(agreement: float | None, every: int | None) -> None:
    """A wire that needs 35 steps; every step compressed would take three times as long as computing."""
    choice = choose_local_steps(
        step_s=0.34, exchange_s={4: 10.0}, every_step_s=1.0, workers=2, layers=50, agreement=agreement
    )
    if every is not None:
        assert choice.settings is not None
        assert choice.settings.every == every
        assert choice.penalty <= 0.01
    else:
        assert choice.settings is None


# Workers, steps of a round, agreement of a step, and the increase of the loss: the cases of docs/local-steps.md.
MEASURED = [
    (2, 31, 0.330, 0.017),
    (2, 31, 0.215, 0.041),
    (2, 31, 0.106, 0.033),
    (2, 15, 0.025, 0.094),
    (2, 30, 0.0165, 0.140),
    (2, 30, 0.0193, 0.109),
    (4, 15, 0.0157, 0.249),
    (4, 15, 0.0203, 0.152),
    (4, 15, 0.0108, 0.173),
    (4, 30, 0.0108, 0.350),
]


@pytest.mark.parametrize(("workers", "every", "agreement", "gap"), MEASURED)
def test_expected_penalties_are_those_that_were_measured(
    workers: int, every: int, agreement: float, gap: float
) -> None:
    assert gap / 2.4 < penalty(workers, every, 4, agreement) < 2.4 * gap


def test_even_the_shortest_rounds_may_cost_too_much() -> None:
    choice = choose_local_steps(
        step_s=0.34, exchange_s={4: 0.5}, every_step_s=1.0, workers=4, layers=50, agreement=0.02
    )
    assert choice.settings is None
    assert choice.step_s == 1.0
    assert "2.0% of a step in common" in choice.reason
    assert "1.0% is allowed" in choice.reason


def test_published_penalties() -> None:
    assert penalty(2, 30) == pytest.approx(0.0048)
    assert penalty(8, 30) == pytest.approx(0.0287)


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 300))
def test_settings_of_any_round_are_valid(every: int, workers: int, layers: int) -> None:
    settings = local_settings(every, 4, workers, layers)
    assert settings.fragments <= min(every, layers)
    assert (settings.delay == 0) == (every == 1)
    spacing = every // settings.fragments
    assert every == 1 or spacing <= settings.delay <= max(spacing, every // 2)
    assert settings.fragments < 16 or spacing * settings.fragments > 0.9 * every, (
        "no time is lost to rounding"
    )
    lr, momentum = outer_rates(workers)
    assert 1 <= lr / (1 - momentum) <= 1.5, "more is unstable with four workers"


def test_the_largest_parameter_is_ready_last() -> None:
    step_s, exchange_s = 1.0, 0.4
    assert every_step_seconds(step_s, exchange_s, 0.0) == pytest.approx(1.04), "hidden but for a tenth"
    assert every_step_seconds(step_s, exchange_s, 0.0, 0.3) == pytest.approx(1.12)
    assert every_step_seconds(step_s, 2.0, 0.1, 0.3) == pytest.approx(2.6), (
        "what does not fit the backward pass"
    )


def test_rounds_of_one_step_take_the_mean() -> None:
    settings = local_settings(1, 4, 4, 10)
    assert (settings.outer_lr, settings.outer_momentum, settings.delay) == (1.0, 0.0, 0)
