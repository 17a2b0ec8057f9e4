"""Every policy keeps to the budget; the heuristics are graded against the program."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.compression.bit_cases import layer, small_tables

from trimtab.planning.compression.layer_options import (
    LayerOptions,
    total_error,
    uniform_cost,
    uniform_error,
)
from trimtab.planning.compression.policies import POLICIES, choose_bits


def a_model(seed: int, layers: int = 24) -> list[LayerOptions]:
    """Sizes and norms as in a transformer: they differ a lot, and errors are not quite halved a bit."""
    draw = random.Random(seed)
    made = []
    for index in range(layers):
        numel = draw.choice([1 << 14, 1 << 16, 3 << 16, 1 << 18])
        one = layer(f"l{index}", numel, 2 ** draw.gauss(0, 1.5))
        wobble = tuple(error * draw.uniform(0.8, 1.25) for error in one.errors)
        made.append(
            LayerOptions(
                name=one.name,
                numel=numel,
                norm=one.norm,
                options=one.options,
                errors=wobble,
                costs=one.costs,
            )
        )
    return made


@pytest.mark.parametrize("policy", POLICIES)
@given(layers=small_tables(), share=st.floats(0, 1.5))
@settings(max_examples=25)
def test_no_policy_breaks_a_budget_that_can_be_met(
    policy: str, layers: list[LayerOptions], share: float
) -> None:
    budget = share * total_error(max(one.errors) for one in layers)
    found = choose_bits(layers, budget=budget, policy=policy)
    assert found.met == (total_error(min(one.errors) for one in layers) <= budget)
    assert found.options.keys() == {one.name for one in layers}
    assert found.policy == policy


@pytest.mark.parametrize("policy", POLICIES)
def test_graded_against_the_program(policy: str) -> None:
    worst = {"dynamic": 1.0, "search": 1.08, "kmeans": 1.15, "linear": 1.25, "uniform": 2.5}[policy]
    for seed in range(6):
        layers = a_model(seed)
        budget = uniform_error(layers, 4)
        exact = choose_bits(layers, budget=budget)
        found = choose_bits(layers, budget=budget, policy=policy)
        assert found.error <= budget
        assert exact.cost * (1 - 1e-4) <= found.cost <= exact.cost * worst
        assert found.cost <= uniform_cost(layers, 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_answer_every_time(policy: str) -> None:
    layers = a_model(3)
    budget = uniform_error(layers, 4)
    first = choose_bits(layers, budget=budget, policy=policy)
    assert first == choose_bits(layers, budget=budget, policy=policy)


def test_uniform_is_uniform_and_linear_follows_the_norm() -> None:
    layers = [layer("large", 1 << 16, 8.0), layer("middle", 1 << 16, 4.0), layer("small", 1 << 16, 1.0)]
    budget = uniform_error(layers, 4)
    assert set(choose_bits(layers, budget=budget, policy="uniform").options.values()) == {4}
    bits = choose_bits(layers, budget=budget, policy="linear").options
    assert (bits["large"] - bits["middle"], bits["middle"] - bits["small"]) == (1, 2)


def test_layers_of_one_cluster_share_their_bits() -> None:
    alike = [layer(f"a{i}", 1 << 18, 1.0 + i / 1000) for i in range(5)]
    others = [layer(f"b{i}", 1 << 12, 20.0 + i / 1000) for i in range(5)]
    bits = choose_bits([*alike, *others], budget=uniform_error([*alike, *others], 4), policy="kmeans").options
    assert max(bits[one.name] for one in alike) < min(bits[one.name] for one in others)


def test_layers_with_other_options_are_told_apart() -> None:
    layers = [layer("a", 1 << 16, 1.0), layer("b", 1 << 16, 1.0, most=4)]
    for policy in POLICIES:
        found = choose_bits(layers, budget=uniform_error(layers, 4), policy=policy)
        assert found.met
        assert found.options["b"] <= 4
