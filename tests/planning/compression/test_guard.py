"""The guard: which signs of trouble raise bits, and which are none."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.planning.compression.guard import BROKEN_PATIENCE, OWED_LIMIT, LayerHealth, guard, loss_trouble


def layer(name: str = "a", bits: int = 2, error: float = 0.5, **more: float) -> LayerHealth:
    return LayerHealth(name=name, bits=bits, norm=more.pop("norm", 1.0), error=error, **more)  # type: ignore[arg-type]


def test_a_healthy_run_is_left_alone() -> None:
    assert guard([layer(), layer("b", 1, 1.9)], limit=2.0, losses=[3.0, 2.9, 2.95, 2.8]) == []


def test_a_layer_beyond_its_limit_gets_the_bits_that_bring_it_back() -> None:
    (raised,) = guard([layer("a", 1, 3.9), layer("b")], limit=2.0)
    assert (raised.name, raised.bits) == ("a", 3)
    assert "3.9 of its gradient, above 2" in raised.reason


def test_what_feedback_owes_counts() -> None:
    (raised,) = guard([layer(owed=OWED_LIMIT * 1.01)], limit=2.0)
    assert raised.bits == 3
    assert "owes" in raised.reason
    (raised,) = guard([layer(owed=math.nan)], limit=2.0)
    assert raised.bits == 3


def test_a_gradient_that_runs_away_counts() -> None:
    assert guard([layer(growth=5.0)], limit=2.0) == []
    (raised,) = guard([layer(growth=50.0)], limit=2.0)
    assert raised.bits == 3
    assert "grown 50-fold" in raised.reason


def test_overflows_of_a_loss_scaler_are_no_trouble_until_they_stay() -> None:
    assert guard([layer(broken=BROKEN_PATIENCE - 1)], limit=2.0) == []
    (raised,) = guard([layer(broken=BROKEN_PATIENCE)], limit=2.0)
    assert raised.bits == 8


def test_a_rising_loss_raises_the_layers_that_hold_most_of_the_error() -> None:
    layers = [layer("small", error=0.1), layer("large", error=0.9), layer("full", bits=8, error=0.2)]
    (raised,) = guard(layers, limit=2.0, losses=[3.0, 2.5, 2.4, 2.9, 3.1])
    assert (raised.name, raised.bits) == ("large", 3)
    assert "the loss rose from 2.4 to 3.1" in raised.reason


@pytest.mark.parametrize(
    ("losses", "trouble"),
    [
        ([], False),
        ([3.0], False),
        ([3.0, 4.0], False),
        ([3.0, math.nan], True),
        ([3.0, 2.5, 2.0, 2.5, 2.05], False),  # a bad stretch
        ([2.0, 3.0, 3.0], False),  # too early to tell
        ([2.0, 2.01, 2.0, 2.02, 2.5, 2.6], True),
        ([2.0, 3.0, 2.0, 3.0, 2.9, 3.0], False),  # it scatters like that
        ([math.nan, math.nan, 2.0, 2.0], False),
        ([0.0, 0.0, 0.0, 0.0], False),
    ],
)
def test_the_trend_of_the_loss(losses: list[float], trouble: bool) -> None:
    assert bool(loss_trouble(losses)) is trouble


@given(
    bits=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    error=st.floats(0, 1e6),
    limit=st.floats(0.01, 10),
    losses=st.lists(st.floats(allow_nan=True), max_size=6),
)
def test_bits_only_rise_and_never_past_the_codec(
    bits: list[int], error: float, limit: float, losses: list[float]
) -> None:
    layers = [layer(str(i), b, error) for i, b in enumerate(bits)]
    for raised in guard(layers, limit=limit, losses=losses):
        assert bits[int(raised.name)] < raised.bits <= 8
