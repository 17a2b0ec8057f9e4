"""The arithmetic of damage, and the usual formulas against real draws of our own rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.precision import reference
from trimtab.predict.damage import (
    Source,
    TensorStatistics,
    bidirectional,
    damage_of,
    fixed_point_variance,
    floating_point_variance,
    plan_damage,
)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), amax=st.floats(1e-6, 1e6))
def test_fixed_point_variance_is_that_of_real_draws(seed: int, amax: float) -> None:
    values = (torch.rand(16, 256, generator=torch.Generator().manual_seed(seed)) * 2 - 1) * amax
    values[:, 0] = amax
    squared = 0.0
    for key in range(8):
        codes, scales = reference.quantize(values, "rows", key=seed + key, stochastic=True)
        squared += float((codes.float() * scales[:, None] - values).double().square().sum()) / 8
    assert squared == pytest.approx(fixed_point_variance(amax, values.numel(), 8), rel=0.05)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-20, 20))
def test_floating_point_variance_is_that_of_real_draws(seed: int, exponent: int) -> None:
    # All of one exponent, and a largest value that the format's scale leaves exact.
    values = (1 + torch.rand(16, 256, generator=torch.Generator().manual_seed(seed))) * 2.0**exponent
    values[0, 0] = 1.75 * 2.0**exponent
    values.clamp_(max=1.75 * 2.0**exponent)
    inside = values < 1.75 * 2.0**exponent
    squared = 0.0
    for key in range(8):
        codes, scale = reference.quantize_fp8(values, torch.float8_e5m2, key=seed + key, stochastic=True)
        squared += float(((codes.float() * scale - values)[inside]).double().square().sum()) / 8
    assert squared == pytest.approx(floating_point_variance(exponent, int(inside.sum()), 2), rel=0.1)


@given(st.floats(1e-3, 1e3), st.integers(1, 10**6), st.integers(2, 12))
def test_one_bit_less_is_about_four_times_worse(amax: float, numel: int, bits: int) -> None:
    one = fixed_point_variance(amax, numel, bits)
    if bits > 2:
        assert fixed_point_variance(amax, numel, bits - 1) > 3 * one
    assert floating_point_variance(0, numel, bits - 1) == pytest.approx(
        4 * floating_point_variance(0, numel, bits)
    )


def _tensor(squared: float = 1.0) -> TensorStatistics:
    return TensorStatistics(squared=squared, amax=1.0, numel=100, exponent=-4)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16", "fp8", "int8"])
def test_the_formula_of_depth_looks_both_ways(precision: str) -> None:
    def at(depth: int, forward: float, backward: float) -> float:
        return bidirectional(
            _tensor(forward), _tensor(1e-6), _tensor(backward), precision, depth=depth, deepest=10
        )

    assert at(1, forward=1.0, backward=1e-6) > at(9, forward=1.0, backward=1e-6)  # errors ahead of everything
    assert at(9, forward=1e-6, backward=1.0) > at(1, forward=1e-6, backward=1.0)  # errors behind everything
    assert at(5, forward=2.0, backward=1.0) > at(5, forward=1.0, backward=1.0) > 0


def test_coarser_formats_hurt_more() -> None:
    t = _tensor()
    hurt = [bidirectional(t, t, t, p, depth=1, deepest=2) for p in ("fp16", "bf16", "fp8")]
    assert hurt == sorted(hurt)
    assert hurt[0] == bidirectional(t, t, t, "tf32", depth=1, deepest=2)


def test_damage_adds_up_over_sources_operators_and_ranks() -> None:
    sources = {
        "a": {"bf16": {"x": Source(error=0.5, gain=4.0), "w": Source(error=1.0, gain=1.0)}},
        "b": {"bf16": {"x": Source(error=0.25, gain=4.0)}, "int8": {"x": Source(error=8.0, gain=1.0)}},
    }
    damage = damage_of(sources)
    assert damage == {"a": {"bf16": 3.0}, "b": {"bf16": 1.0, "int8": 8.0}}
    assert plan_damage(damage, []) == 0
    whole = plan_damage(damage, [({"a": "bf16", "b": "int8"}, 1.0)])
    assert whole == 11
    # A rank with half of the batch adds a quarter, and two of them half: errors average out.
    half = ({"a": "bf16", "b": "int8"}, 0.5)
    assert plan_damage(damage, [half, ({}, 0.5)]) == whole / 4
    assert plan_damage(damage, [half, half]) == whole / 2
