"""Bits per layer: the dynamic program against exhaustive search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.compression.bit_cases import cheapest_of_all, layer, small_tables

from trimtab.planning.compression.dynamic_program import BINS
from trimtab.planning.compression.layer_options import (
    LayerOptions,
    total_error,
    uniform_cost,
    uniform_error,
)
from trimtab.planning.compression.policies import choose_bits


@given(layers=small_tables(), share=st.floats(0, 1.5), scale=st.sampled_from([1e-9, 1.0, 1e9]))
@settings(max_examples=150)
def test_within_the_bins_of_the_cheapest_of_all(
    layers: list[LayerOptions], share: float, scale: float
) -> None:
    layers = [_scaled(one, scale) for one in layers]
    worst = total_error(max(one.errors) for one in layers)
    budget = share * worst
    found = choose_bits(layers, budget=budget)
    best = cheapest_of_all(layers, budget)
    if best is None:
        assert not found.met
        assert found.error == total_error(min(one.errors) for one in layers)
        return
    assert found.met
    assert found.error <= budget
    assert found.cost >= best - 1e-9 * abs(best)
    # What is rounded up is less than a bin for each layer, and the margin for rounding.
    tolerated = budget * (max(0.0, 1 - len(layers) / BINS) ** 0.5) * (1 - 1e-12)
    nearly = cheapest_of_all(layers, tolerated)
    if nearly is not None:
        assert found.cost <= nearly * (1 + 1e-6)


def test_a_budget_that_is_the_error_of_an_assignment_admits_it() -> None:
    layers = [layer(f"l{i}", 1000 + 37 * i, 0.1 + i / 7) for i in range(40)]
    for bits in range(1, 9):
        found = choose_bits(layers, budget=uniform_error(layers, bits))
        assert found.met
        assert found.cost <= uniform_cost(layers, bits)


def test_large_layers_with_small_gradients_get_few_bits() -> None:
    layers = [layer("head", 10_000, 10.0), layer("body", 1_000_000, 1.0), layer("alike", 1_000_000, 1.0)]
    found = choose_bits(layers, budget=uniform_error(layers, 4))
    assert found.options["head"] > 4 > found.options["body"]
    assert abs(found.options["body"] - found.options["alike"]) <= 1
    assert found.cost < 0.75 * uniform_cost(layers, 4)


def test_an_option_with_more_error_and_more_cost_is_never_taken() -> None:
    odd = LayerOptions(
        name="odd", numel=10, norm=1.0, options=(1, 2, 3), errors=(1.0, 5.0, 0.5), costs=(1.0, 2.0, 3.0)
    )
    for budget in (0.5, 0.9, 1.0, 4.9, 5.0, 100.0):
        assert choose_bits([odd], budget=budget).options["odd"] == (3 if budget < 1 else 1)


def test_a_budget_nobody_meets_gives_the_most_exact_and_says_so() -> None:
    layers = [layer("a", 5000, 1.0), layer("b", 5000, 2.0)]
    found = choose_bits(layers, budget=0.0)
    assert not found.met
    assert found.options == {"a": 8, "b": 8}


def test_gradients_without_error_take_the_least_bits() -> None:
    layers = [layer("flat", 5000, 0.0), layer("other", 5000, 1.0)]
    found = choose_bits(layers, budget=uniform_error(layers, 4))
    assert found.options == {"flat": 1, "other": 4}
    assert choose_bits([layers[0]], budget=0.0).options == {"flat": 1}


def test_five_hundred_layers_all_alike() -> None:
    """Nothing can be settled beforehand here: the program runs over every option of every layer."""
    layers = [layer(f"l{i}", 1 << 16, 1.0) for i in range(500)]
    budget = 1.07 * uniform_error(layers, 4)
    found = choose_bits(layers, budget=budget)
    assert found.met
    # A layer at 3 bits instead of 4 spends (1/7)² - (1/15)² more; so many fit.
    fit = int(500 * (1.07**2 - 1) / 15**2 / (1 / 49 - 1 / 225))
    assert list(found.options.values()).count(3) >= fit * 0.9
    assert found == choose_bits(layers, budget=budget)


def test_other_families_of_options_serve_as_well() -> None:
    ranks = [
        LayerOptions(
            name=n, numel=64, norm=1.0, options=(1, 4, 16), errors=(0.9, e, 0.1), costs=(2.0, 8.0, 32.0)
        )
        for n, e in (("steep", 0.2), ("shallow", 0.8))
    ]
    assert choose_bits(ranks, budget=0.95).options == {"steep": 4, "shallow": 1}


def test_refuses_what_it_cannot_answer() -> None:
    layers = [layer("a", 5000, 1.0)]
    with pytest.raises(ValueError, match="choose dynamic, uniform"):
        choose_bits(layers, budget=1.0, policy="guess")
    with pytest.raises(ValueError, match="at least 0"):
        choose_bits(layers, budget=float("nan"))
    with pytest.raises(ValueError, match="same name"):
        choose_bits(layers * 2, budget=1.0)
    with pytest.raises(ValueError, match="has no option 9"):
        uniform_error(layers, 9)


def test_no_layers_cost_nothing() -> None:
    found = choose_bits([], budget=0.0)
    assert (found.options, found.cost, found.error, found.met) == ({}, 0.0, 0.0, True)


def _scaled(one: LayerOptions, scale: float) -> LayerOptions:
    return LayerOptions(
        name=one.name,
        numel=one.numel,
        norm=one.norm * scale,
        options=one.options,
        errors=tuple(error * scale for error in one.errors),
        costs=tuple(cost * scale for cost in one.costs),
    )
