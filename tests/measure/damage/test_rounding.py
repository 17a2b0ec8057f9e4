"""Expected errors of roundings, against many real draws of the kernels that round."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.measure.damage import rounding
from trimtab.precision import reference
from trimtab.precision.draw import Draw, Operand
from trimtab.precision.int8 import quantize

DRAWS = 400


def _matrix(seed: int, rows: int, columns: int) -> torch.Tensor:
    """Rows of very different sizes, some elements far below the largest."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) ** 3
    return values * torch.logspace(-3, 3, rows)[torch.randperm(rows, generator=generator), None]


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 9)),
    axis=st.sampled_from(["rows", "columns", "whole"]),
    folded=st.sampled_from(["none", "rows", "columns"]),
)
def test_int8_errors_are_those_of_real_draws(
    seed: int, shape: tuple[int, int], axis: rounding.Axis, folded: str
) -> None:
    values = _matrix(seed, *shape)
    row = torch.logspace(-1, 1, shape[0]) if folded == "rows" else None
    column = torch.logspace(1, -1, shape[1]) if folded == "columns" else None
    factor = torch.ones(shape)
    factor = factor * row[:, None] if row is not None else factor
    factor = factor * column if column is not None else factor
    draws = []
    for call in range(DRAWS):
        draw = Draw(seed, torch.tensor([call]), stochastic=True)
        codes, scales = quantize(values, axis, draw, Operand.INPUT, row_factor=row, column_factor=column)
        steps = {"rows": scales[:, None], "columns": scales, "whole": scales}[axis]
        draws.append((codes.float() * steps / factor - values).double())
    errors = torch.stack(draws)
    expected = rounding.int8(values, axis, factor).double()
    # Within 6 deviations: of a square at most a quarter of the step's, of an error half a step. And no bias.
    step = (rounding.int8_scales(values * factor, axis) / factor).double()
    assert ((errors.square().mean(0) - expected).abs() <= 1.5 * step.square() * DRAWS**-0.5 + 1e-12).all()
    assert (errors.mean(0).abs() <= 3 * step * DRAWS**-0.5 + 1e-6 * values.abs()).all()


@settings(max_examples=12)
@given(seed=st.integers(0, 2**31), stochastic=st.booleans(), e5m2=st.booleans())
def test_fp8_errors_are_those_of_real_draws(seed: int, stochastic: bool, e5m2: bool) -> None:
    dtype = torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn
    values = _matrix(seed, 4, 8)
    draws = []
    for key in range(DRAWS if stochastic else 1):
        codes, scale = reference.quantize_fp8(values, dtype, key=key, stochastic=stochastic)
        draws.append((codes.float() * scale - values).double())
    found = torch.stack(draws).square().mean(0)
    expected = rounding.fp8(values, dtype, stochastic=stochastic).double()
    if stochastic:
        top, mantissa, least = reference.FP8[dtype]
        scale = values.abs().amax() / top
        step = scale * 2.0 ** (torch.log2(values.abs() / scale).floor().clamp_min(least) - mantissa)
        assert ((found - expected).abs() <= 1.5 * step.square() * DRAWS**-0.5).all()
    else:
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=float(values.square().max()) * 1e-12)


@pytest.mark.parametrize(("name", "dtype"), rounding.HALF.items())
def test_half_errors_are_exact(name: str, dtype: torch.dtype) -> None:
    values = _matrix(0, 5, 64)
    assert torch.equal(rounding.half(values, name), (values.to(dtype).float() - values).square())


def test_fp16_gradients_are_scaled_first() -> None:
    values = torch.randn(64) * 1e-9
    assert rounding.half(values, "fp16").sum() == pytest.approx(float(values.square().sum()))  # all lost
    relative = rounding.half(values, "fp16", scaled=True).sum() / values.square().sum()
    assert 0 < relative < 2.0**-20
    assert not rounding.half(torch.tensor([1e6]), "fp16").isfinite().any()  # beyond its range


def test_tf32_keeps_ten_bits_of_fraction() -> None:
    values = torch.tensor([1.0, 1 + 2**-10, -1 - 2**-12, 3.0])
    assert rounding.tf32(values).tolist() == [0, 0, 2.0**-24, 0]


def test_what_is_not_encoded_is_lost_whole() -> None:
    values = torch.tensor([[1e-35, 2e-35], [1.0, 0.5]])
    error = rounding.int8(values, "rows")
    assert torch.equal(error[0], values[0].square())
    assert error[1, 0] == 0
    assert rounding.int8(torch.zeros(3, 4), "rows").sum() == 0
    assert rounding.int8(torch.zeros(0, 4), "rows").shape == (0, 4)
