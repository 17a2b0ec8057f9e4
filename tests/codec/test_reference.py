"""What the codec promises, of the oracle and of the kernels that serve the CPU alike."""

from __future__ import annotations

import mmap
import struct
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec import scalar
from tests.codec.cases import SPECIAL, payload, same, values

from trimtab.codec.contract import Kernels
from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import DTYPES, Packing, Segment
from trimtab.codec.reference import ReferenceKernels, pack, unpack
from trimtab.random_bits import name_hash, stream

FAST = kernels_for(torch.device("cpu"))
BOTH = pytest.mark.parametrize(
    "kernels", {k.name: k for k in (ReferenceKernels(), FAST)}.values(), ids=lambda k: str(k.name)
)


def one(numel: int, bits: int, block: int, dtype: torch.dtype = torch.float32) -> Packing:
    return Packing(segments=(Segment(offset=0, numel=numel, bits=bits, block=block),), dtype=dtype)


def encoded(kernels: Kernels, x: torch.Tensor, packing: Packing, **keywords: float) -> torch.Tensor:
    out = payload(packing.nbytes, 11)
    kernels.encode(x, packing, out, **{"stream": 1, **keywords})  # type: ignore[arg-type]
    return out


def decoded(kernels: Kernels, data: torch.Tensor, packing: Packing) -> torch.Tensor:
    y = torch.full((packing.extent,), 7.0, dtype=packing.dtype)
    kernels.decode(data, packing, y)
    return y


def units(data: torch.Tensor, packing: Packing) -> torch.Tensor:
    """The unit of each element of a packing of one segment."""
    (segment,) = packing.segments
    pairs = data[: 8 * segment.blocks].clone().view(torch.float32).view(-1, 2)
    return pairs[:, 1].repeat_interleave(segment.block)[: segment.numel]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    x=st.lists(st.floats(width=32) | st.floats(-3, 3, width=32) | st.sampled_from(SPECIAL), max_size=40),
    bits=st.integers(1, 8),
    block=st.sampled_from((8, 9, 13, 1024)),
    scale=st.sampled_from((1.0, 0.1, -2.0, 1e20)),
    key=st.none() | st.integers(0, 2**64 - 1),
)
@BOTH
def test_agrees_with_the_document(
    kernels: Kernels, x: list[float], bits: int, block: int, scale: float, key: int | None
) -> None:
    name, first = name_hash("w"), 9
    segment = Segment(offset=0, numel=len(x), bits=bits, block=block, name_hash=name, first_block=first)
    packing = Packing(segments=(segment,), dtype=torch.float32)
    out = payload(packing.nbytes, 3)
    flat = torch.tensor(x, dtype=torch.float32)
    kernels.encode(flat, packing, out, stream=key or 0, scale=scale, stochastic=key is not None)
    expected = scalar.encode(x, bits=bits, block=block, scale=scale, stream=key, name_hash=name, first=first)
    assert bytes(out) == expected
    values = scalar.decode(expected, len(x), bits=bits, block=block)
    assert same(decoded(kernels, out, packing), torch.tensor(values, dtype=torch.float32))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(bits=st.integers(1, 8), rows=st.integers(1, 4), length=st.integers(1, 50), seed=st.integers(0, 99))
def test_packing_codes_loses_none(bits: int, rows: int, length: int, seed: int) -> None:
    codes = torch.randint(2**bits, (rows, length), generator=torch.Generator().manual_seed(seed))
    data = pack(codes, bits)
    assert data.shape == (rows, -(-length * bits // 8))
    assert torch.equal(unpack(data, bits, length), codes)


@BOTH
@pytest.mark.parametrize("bits", range(1, 9))
def test_error_is_below_one_unit_or_half(kernels: Kernels, bits: int) -> None:
    packing = one(20_000, bits, 100)
    x = values("normal", 20_000, torch.float32, bits)
    for stochastic, bound in ((True, 1.0), (False, 0.5)):
        data = encoded(kernels, x, packing, stochastic=stochastic)
        error = (decoded(kernels, data, packing).double() - x.double()).abs()
        rounding = 4 * torch.finfo(torch.float32).eps * x.abs().max()
        assert (error <= bound * units(data, packing) * (1 + 1e-5) + rounding).all()


@BOTH
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_stochastic_rounding_is_unbiased(kernels: Kernels, bits: int) -> None:
    """The mean of 500 encodings: each element within 5.5 deviations, and their mean within 5.

    Three encodings more are allowed an element, where the normal law fails: those next to a code.
    """
    packing, steps = one(4000, bits, 1000), 500
    x = values("normal", 4000, torch.float32, 5)
    total = torch.zeros(4000, dtype=torch.float64)
    for step in range(steps):
        data = encoded(kernels, x, packing, stream=stream(0, step, 0, 0))
        total += decoded(kernels, data, packing).double()
    unit = units(data, packing).double()
    place = (x.double() - x.view(4, 1000).amin(1).repeat_interleave(1000)) / unit % 1
    deviation = unit * (place * (1 - place) / steps).sqrt()
    bias = total / steps - x.double()
    assert (bias.abs() <= 5.5 * deviation + 3 * unit / steps).all()
    assert abs(bias.mean()) <= 5 * deviation.square().sum().sqrt() / 4000 + unit.mean() * 2**-14


@BOTH
def test_noise_of_ranks_cancels(kernels: Kernels) -> None:
    """With a stream for each rank the mean error of 16 ranks is a quarter; with one stream, it would stay."""
    packing, ranks = one(50_000, 4, 1000), 16
    x = values("normal", 50_000, torch.float32, 6)
    sent = [encoded(kernels, x, packing, stream=stream(0, 0, rank, 0)) for rank in range(ranks)]
    errors = torch.stack([decoded(kernels, data, packing) - x for data in sent])
    assert errors.mean(0).std() / errors[0].std() == pytest.approx(0.25, rel=0.05)


@BOTH
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_a_flat_block_is_exact(kernels: Kernels, bits: int) -> None:
    for value in (0.0, 1.0, -3.3e38, 1e-45, 0.1):
        packing = one(100, bits, 16)
        x = torch.full((100,), value)
        data = encoded(kernels, x, packing)
        assert torch.equal(decoded(kernels, data, packing), x)
        assert not data[8 * packing.segments[0].blocks :].any(), "codes and padding are zero"


@BOTH
def test_negative_zero_leaves_no_trace(kernels: Kernels) -> None:
    for x in (torch.full((20,), -0.0), torch.tensor([0.0, -0.0] * 10), torch.tensor([-0.0, 1.0] * 10)):
        data = encoded(kernels, x, one(20, 4, 32))
        assert bytes(data[:4]) == bytes(4)
        assert bytes(data[4:8]) != struct.pack("<f", -0.0)


@BOTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 31, 32, 63, 64, 99])
def test_a_non_finite_value_makes_its_block_nan(kernels: Kernels, bad: float, at: int) -> None:
    """Wherever it lies in the block; the blocks beside it are unharmed."""
    for base in (torch.zeros(300), values("normal", 300, torch.float32, 1)):
        x = base.clone()
        x[100 + at] = bad
        packing = one(300, 4, 100)
        data = encoded(kernels, x, packing)
        assert bytes(data[8:16]) == struct.pack("<II", 0x7FC00000, 0x7FC00000)
        assert not data[24 + 50 : 24 + 100].any()
        y = decoded(kernels, data, packing)
        assert y[100:200].isnan().all()
        assert y[:100].isfinite().all()
        assert y[200:].isfinite().all()


@BOTH
def test_a_range_beyond_fp32_is_nan_not_wrong(kernels: Kernels) -> None:
    x = torch.tensor([-3e38, 3e38] * 10)
    assert decoded(kernels, encoded(kernels, x, one(20, 4, 32)), one(20, 4, 32)).isnan().all()


@BOTH
def test_small_fp16_ranges_do_not_underflow(kernels: Kernels) -> None:
    """`unit` is fp32: a range of a few fp16 subnormals keeps its values."""
    x = (torch.arange(16) * 2.0**-24).half()
    packing = one(16, 4, 16, torch.float16)
    assert torch.equal(decoded(kernels, encoded(kernels, x, packing), packing), x)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_raw_passes_everything(kernels: Kernels, dtype: torch.dtype) -> None:
    x = torch.tensor(SPECIAL).to(dtype)
    packing = one(x.numel(), 0, 8, dtype)
    data = encoded(kernels, x, packing)
    assert same(decoded(kernels, data, packing), x)
    assert same(
        decoded(kernels, encoded(kernels, x, packing, scale=0.5), packing), (x.float() * 0.5).to(dtype)
    )


@BOTH
@pytest.mark.parametrize("cuts", [(3,), (1, 2, 7)])
def test_splitting_at_blocks_changes_no_bit(kernels: Kernels, cuts: tuple[int, ...]) -> None:
    """A parameter in several segments, in other places and payloads, decodes to the same bits."""
    block, numel = 100, 950
    x = values("normal", numel, torch.float32, 2)
    whole = Packing(
        segments=(Segment(offset=0, numel=numel, bits=5, block=block, name_hash=8),), dtype=x.dtype
    )
    expected = decoded(kernels, encoded(kernels, x, whole), whole)
    bounds = [0, *cuts, 10]
    for first, last in pairwise(bounds):
        part = x[first * block : last * block]
        segment = Segment(offset=3, numel=part.numel(), bits=5, block=block, name_hash=8, first_block=first)
        packing = Packing(segments=(segment,), dtype=x.dtype)
        flat = torch.cat((torch.full((3,), 9.0), part))
        actual = decoded(kernels, encoded(kernels, flat, packing), packing)[3:]
        assert torch.equal(actual, expected[first * block : last * block])


@BOTH
def test_the_owner_keeps_what_it_sends(kernels: Kernels) -> None:
    packing = one(3000, 4, 1000)
    flat = values("normal", 3000, torch.float32, 1)
    peers = [encoded(kernels, values("normal", 3000, torch.float32, i), packing) for i in (2, 3)]
    exact = flat * 0.5 + decoded(kernels, peers[0], packing) + decoded(kernels, peers[1], packing)
    out = payload(packing.nbytes, 1)
    kernels.reduce_encode(flat, peers, packing, out, stream=4, scale=0.5)
    assert torch.equal(flat, decoded(kernels, out, packing))
    assert torch.equal(out, encoded(kernels, exact, packing, stream=4))


@BOTH
def test_elements_between_segments_are_untouched(kernels: Kernels) -> None:
    segments = (Segment(offset=2, numel=9, bits=4, block=8), Segment(offset=15, numel=5, bits=0))
    packing = Packing(segments=segments, dtype=torch.bfloat16)
    flat = torch.arange(24).bfloat16()
    kernels.decode(payload(packing.nbytes, 1), packing, flat)
    kept = [0, 1, *range(11, 15), *range(20, 24)]
    assert flat[kept].tolist() == kept


@pytest.mark.soak
def test_more_elements_than_32_bits_count() -> None:
    """Memory never written costs nothing; the last blocks must come out as they would alone."""
    if FAST.name == "reference":
        pytest.skip("the reference would take minutes")
    numel, block = 2**31 + 5000, 4096
    with mmap.mmap(-1, 2 * numel) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        flat = torch.frombuffer(memory, dtype=torch.bfloat16)
        flat[-7000:] = values("normal", 7000, torch.bfloat16, 1)
        whole = one(numel, 1, block, torch.bfloat16)
        data = torch.empty(whole.nbytes, dtype=torch.uint8)
        FAST.encode(flat, whole, data, stream=1)
        first = numel // block - 2
        (segment,) = whole.segments
        tail = Segment(
            offset=first * block, numel=numel - first * block, bits=1, block=block, first_block=first
        )
        alone = Packing(segments=(tail,), dtype=torch.bfloat16)
        expected = encoded(ReferenceKernels(), flat, alone)
        pairs = data[8 * first : 8 * segment.blocks]
        codes = data[8 * segment.blocks + first * block // 8 :]
        assert torch.equal(torch.cat((pairs, codes)), expected)
        assert not data[: 8 * first].any()
        del flat
