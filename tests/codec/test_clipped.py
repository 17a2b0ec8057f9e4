"""Clipped ranges: smaller errors at few bits, nothing lost for good, NaN and Inf untouched."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.codec import ErrorFeedback
from trimtab.codec.clipped import LARGEST, ClippedKernels
from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import Packing, Segment

CPU = torch.device("cpu")
CLIPPED, PLAIN = ClippedKernels(kernels_for(CPU)), kernels_for(CPU)


def through(
    values: torch.Tensor, bits: int, *, kernels: ClippedKernels = CLIPPED, block: int = 1024
) -> torch.Tensor:
    packing = Packing(
        segments=(Segment(offset=0, numel=values.numel(), bits=bits, block=block),), dtype=values.dtype
    )
    payload = torch.empty(packing.nbytes, dtype=torch.uint8)
    kernels.encode(values, packing, payload, stream=1, stochastic=False)
    out = torch.empty_like(values)
    kernels.decode(payload, packing, out)
    return out


def normal(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def error(values: torch.Tensor, out: torch.Tensor) -> float:
    return float((out - values).norm() / values.norm())


@pytest.mark.parametrize(("bits", "bound"), [(1, 0.63), (2, 0.36), (3, 0.21)])
def test_a_normal_distribution_errs_as_little_as_so_many_even_levels_can(bits: int, bound: float) -> None:
    values = normal(65536)
    assert error(values, through(values, bits)) < bound
    assert error(values, through(values, bits)) < 0.75 * error(values, through(values, bits, kernels=PLAIN))  # type: ignore[arg-type]


def test_with_bits_to_spare_nothing_is_clipped() -> None:
    values = normal(4096) ** 3
    for bits in range(4, 9):
        assert torch.equal(through(values, bits), through(values, bits, kernels=PLAIN))  # type: ignore[arg-type]


def test_values_are_not_touched_and_raw_ones_travel_as_they_are() -> None:
    flat = normal(3000)
    before = flat.clone()
    segments = (Segment(offset=0, numel=1500, bits=2, block=256), Segment(offset=1500, numel=1500, bits=0))
    packing = Packing(segments=segments, dtype=flat.dtype)
    payload = torch.empty(packing.nbytes, dtype=torch.uint8)
    CLIPPED.encode(flat, packing, payload, stream=0, scale=0.5, stochastic=False)
    assert torch.equal(flat, before)
    out = torch.empty_like(flat)
    CLIPPED.decode(payload, packing, out)
    assert torch.equal(out[1500:], 0.5 * before[1500:])
    assert error(0.5 * before[:1500], out[:1500]) < 0.5


def test_what_is_cut_off_is_sent_by_later_steps() -> None:
    """A lone large value, step after step: owed no more than the share that the range reaches to allows."""
    memory, values = ErrorFeedback(), normal(1024) * 1e-3
    values[7] = 1.0
    sent = torch.zeros(1024)
    for _ in range(60):
        meant = values.clone()
        memory.restore("w", meant)
        out = through(meant, 2)
        memory.keep("w", meant, out)
        sent += out
    assert float(sent[7]) > 60 - 1.5 / LARGEST
    assert error(60 * values, sent) < 0.2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    values = normal(2048)
    values[5] = bad
    out = through(values, 2)
    assert not math.isfinite(float(out[5]))
    assert bool(out[1024:].isfinite().all())


@given(
    numel=st.integers(1, 700), bits=st.integers(1, 8), block=st.integers(8, 300), scale=st.floats(1e-30, 1e30)
)
def test_any_size_decodes_to_finite_values_within_the_range(
    numel: int, bits: int, block: int, scale: float
) -> None:
    values = normal(numel) * scale
    out = through(values, bits, block=block)
    assert bool(out.isfinite().all())
    assert float(out.abs().max()) <= float(values.abs().max()) * (1 + 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    values = normal(4096).to(dtype)
    assert error(values.float(), through(values, 2).float()) < 0.4


def test_sums_are_clipped_when_they_are_encoded_again() -> None:
    values = normal(2048)
    packing = Packing(segments=(Segment(offset=0, numel=2048, bits=2, block=1024),), dtype=torch.float32)
    payload, out = (torch.empty(packing.nbytes, dtype=torch.uint8) for _ in range(2))
    CLIPPED.encode(values, packing, payload, stream=0, stochastic=False)
    flat = values.clone()
    CLIPPED.reduce_encode(flat, [payload], packing, out, stream=0, scale=0.5, stochastic=False)
    decoded = torch.empty_like(flat)
    CLIPPED.decode(out, packing, decoded)
    assert torch.equal(flat, decoded)
    assert error(0.5 * values + through(values, 2), flat) < 0.4
