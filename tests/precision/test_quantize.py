"""8-bit operands: every implementation gives the reference's bits, and rounding is fair."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.codec.native import INSTRUCTION_SETS, NativeKernels, available
from trimtab.precision import native, reference
from trimtab.precision.draw import Draw, Operand, base_key
from trimtab.precision.int8 import LONGEST_SUM, Axis, product, quantize

AXES: tuple[Axis, ...] = ("rows", "columns", "whole")
SETS = (
    INSTRUCTION_SETS[1 : INSTRUCTION_SETS.index(NativeKernels().instruction_set) + 1] if available() else ()
)


def draw(seed: int = 0, *, stochastic: bool = True) -> Draw:
    return Draw(base_key(seed, 0, 5), torch.tensor([3]), stochastic)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))


@pytest.mark.skipif(not SETS, reason="the native kernels are not built")
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.sampled_from([1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 256, 257, 520]),
    axis=st.sampled_from(AXES),
    stochastic=st.booleans(),
    factors=st.tuples(st.booleans(), st.booleans()),
    spoil=st.sampled_from(["", "nan", "inf", "zeros", "tiny", "huge"]),
    seed=st.integers(0, 2**64 - 1),
)
def test_native_gives_the_references_bits(
    rows: int, columns: int, axis: Axis, stochastic: bool, factors: tuple[bool, bool], spoil: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**63)
    x = torch.randn(rows, columns, generator=generator)
    if spoil in ("nan", "inf"):
        x[rows // 2, columns // 2] = float(spoil)
    x *= {"zeros": 0.0, "tiny": 1e-38, "huge": 1e35}.get(spoil, 1.0)
    arguments = {
        "key": seed,
        "stochastic": stochastic,
        "row_factor": torch.rand(rows, generator=generator) if factors[0] else None,
        "column_factor": torch.rand(columns, generator=generator) if factors[1] else None,
    }
    codes, scales = reference.quantize(x, axis, **arguments)  # type: ignore[arg-type]
    for name in SETS:
        actual, actual_scales = native.quantize(x, axis, **arguments, instruction_set=name)  # type: ignore[arg-type]
        assert torch.equal(actual, codes), name
        assert same(actual_scales, scales), name


@pytest.mark.skipif(not SETS, reason="the native kernels are not built")
@pytest.mark.parametrize("threads", [1, 3])
def test_dequantize_and_threads_give_the_references_bits(threads: int) -> None:
    sums = torch.randint(-(10**6), 10**6, (700, 1030), dtype=torch.int32)
    row, column = torch.rand(700), torch.rand(1030)
    x = torch.randn(700, 1030)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name, (a, b, c) in itertools.product(
            SETS, itertools.product((row, None), (column, None), (column, None))
        ):
            actual = native.dequantize(sums.clone(), a, b, c, instruction_set=name)
            assert torch.equal(actual, reference.dequantize(sums, a, b, c))
        for axis in AXES:
            actual_codes, _ = native.quantize(x, axis, key=9, stochastic=True)
            assert torch.equal(actual_codes, reference.quantize(x, axis, key=9, stochastic=True)[0])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("stochastic", [True, False])
def test_the_error_is_below_a_step_or_half_of_one(axis: Axis, stochastic: bool) -> None:
    x = torch.randn(64, 96) * torch.logspace(-3, 3, 64)[:, None]
    codes, scales = quantize(x, axis, draw(stochastic=stochastic), Operand.INPUT)
    step = scales[:, None] if axis == "rows" else scales
    error = (codes.double() * step.double() - x.double()).abs()
    assert bool((error <= step * (1.0 if stochastic else 0.5) * (1 + 1e-4)).all())
    assert int(codes.abs().max()) == 127


def test_stochastic_rounding_is_unbiased_and_has_the_predicted_variance() -> None:
    x = torch.randn(32, 256)
    values = []
    for seed in range(400):
        codes, scales = quantize(x, "whole", draw(seed), Operand.INPUT)
        values.append(codes.double() * scales.double())
    drawn = torch.stack(values)
    step = float(x.abs().max() / 127)
    # The mean of 400 draws has a deviation of at most step / 2 / √400; the mean over 8192 values, 90 times less.
    assert float((drawn.mean(0) - x).abs().max()) < 6 * step / 2 / 20
    assert abs(float((drawn.mean(0) - x).mean())) < 5 * step / 2 / 20 / 90
    # The variance that plans are made with: S² / 6 for each value.
    assert float(drawn.var(0).mean()) == pytest.approx(step**2 / 6, rel=0.05)


def test_nearest_rounding_shrinks_nothing_either() -> None:
    x = torch.rand(64, 4096)  # all positive: truncation would show as a lower mean
    codes, scales = quantize(x, "rows", draw(stochastic=False), Operand.INPUT)
    error = (codes.double() * scales.double()[:, None] - x).mean()
    assert abs(float(error)) < float(scales.mean()) * 0.01


def test_a_stream_belongs_to_seed_call_operand_and_operator() -> None:
    x = torch.randn(8, 64)
    first = quantize(x, "rows", draw(), Operand.INPUT)[0]
    assert torch.equal(first, quantize(x, "rows", draw(), Operand.INPUT)[0])
    others = [
        quantize(x, "rows", draw(1), Operand.INPUT)[0],
        quantize(x, "rows", draw(), Operand.WEIGHT)[0],
        quantize(x, "rows", Draw(base_key(0, 0, 5), torch.tensor([4]), True), Operand.INPUT)[0],
        quantize(x, "rows", Draw(base_key(0, 1, 5), torch.tensor([3]), True), Operand.INPUT)[0],
        quantize(x, "rows", Draw(base_key(0, 0, 6), torch.tensor([3]), True), Operand.INPUT)[0],
    ]
    assert not any(torch.equal(first, other) for other in others)


def test_a_row_that_is_not_finite_gives_nan_and_spares_the_others() -> None:
    x = torch.randn(4, 8)
    x[1, 2], x[2, 3] = float("inf"), float("nan")
    codes, scales = quantize(x, "rows", draw(), Operand.INPUT)
    assert scales.isnan().tolist() == [False, True, True, False]
    y = product(codes, torch.ones(8, 3, dtype=torch.int8), row_scale=scales)
    assert y.isnan().all(1).tolist() == [False, True, True, False]


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 40),
    k=st.integers(1, 70),
    n=st.integers(1, 40),
    transposed=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 1000),
)
def test_sums_are_exact_in_any_layout(
    m: int, k: int, n: int, transposed: tuple[bool, bool], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-127, 128, (k, m) if transposed[0] else (m, k), dtype=torch.int8, generator=generator)
    b = torch.randint(-127, 128, (n, k) if transposed[1] else (k, n), dtype=torch.int8, generator=generator)
    a, b = (a.t() if transposed[0] else a), (b.t() if transposed[1] else b)
    assert torch.equal(product(a, b).double(), a.double() @ b.double())


def test_sums_too_long_for_int32_do_not_overflow() -> None:
    length = LONGEST_SUM + 5000
    a = torch.full((1, length), 127, dtype=torch.int8)
    assert float(product(a, a.t())) == pytest.approx(127 * 127 * length, rel=1e-6)
    bias = torch.tensor([-5.0])
    assert float(product(a, -a.t(), bias=bias)) == pytest.approx(-127 * 127 * length - 5, rel=1e-6)
