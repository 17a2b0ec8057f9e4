from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.codec.packing import DTYPES, MAX_BLOCK, Packing, Segment, check_buffers
from trimtab.random_bits import name_hash


@given(numel=st.integers(0, 2**40), bits=st.integers(1, 8), block=st.integers(8, 5000))
def test_size_is_the_sum_of_its_parts(numel: int, bits: int, block: int) -> None:
    full, rest = divmod(numel, block)
    codes = full * ((block * bits + 7) // 8) + (rest * bits + 7) // 8
    pairs = full + (rest > 0)
    segment = Segment(offset=0, numel=numel, bits=bits, block=block)
    assert segment.nbytes(4) == pairs * 8 + codes + -codes % 8
    assert segment.nbytes(4) == segment.nbytes(2)


@pytest.mark.parametrize(
    ("numel", "itemsize", "nbytes"), [(0, 4, 0), (1, 4, 8), (3, 2, 8), (5, 2, 16), (2**33, 4, 2**35)]
)
def test_raw_size(numel: int, itemsize: int, nbytes: int) -> None:
    assert Segment(offset=0, numel=numel, bits=0).nbytes(itemsize) == nbytes


def test_four_bits_cost_an_eighth_and_a_little() -> None:
    assert Segment(offset=0, numel=2**20, bits=4, block=1024).nbytes(4) == 2**19 + 2**10 * 8


def test_payload_is_the_segments_in_order() -> None:
    segments = tuple(Segment(offset=o, numel=n, bits=b) for o, n, b in ((5, 10, 4), (0, 0, 4), (20, 3, 0)))
    packing = Packing(segments=segments, dtype=torch.float16)
    assert packing.starts == (0, 16, 16)
    assert packing.nbytes == 24
    assert packing.extent == 23
    assert Packing(segments=(), dtype=torch.float32).nbytes == 0


@pytest.mark.parametrize("wrong", [{"bits": 9}, {"bits": -1}, {"block": 7}, {"block": MAX_BLOCK + 1}])
def test_settings_out_of_range(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Segment(**{"offset": 0, "numel": 1, "bits": 4, **wrong})


@pytest.mark.parametrize("field", ["offset", "numel", "first_block"])
def test_nothing_negative(field: str) -> None:
    with pytest.raises(ValueError, match="negative"):
        Segment(**{"offset": 0, "numel": 1, "bits": 4, field: -1})


def test_only_floats_of_the_wire() -> None:
    with pytest.raises(ValueError, match="float64"):
        Packing(segments=(), dtype=torch.float64)
    assert (torch.float32, torch.float16, torch.bfloat16) == DTYPES, "their order is on the wire"


def test_name_hash_is_the_documented_one() -> None:
    assert name_hash("") == int.from_bytes(bytes.fromhex("e4a6a0577479b2b4"), "little")
    assert len({name_hash(f"layer.{i}.weight") for i in range(1000)}) == 1000


@pytest.mark.parametrize(
    ("flat", "payload", "reason"),
    [
        (torch.zeros(5, 2), torch.zeros(16, dtype=torch.uint8), "1-D"),
        (torch.zeros(20)[::2], torch.zeros(16, dtype=torch.uint8), "contiguous"),
        (torch.zeros(10).half(), torch.zeros(16, dtype=torch.uint8), "float32"),
        (torch.zeros(9), torch.zeros(16, dtype=torch.uint8), "reaches element 10"),
        (torch.zeros(10), torch.zeros(15, dtype=torch.uint8), "found 15 bytes, expected 16"),
        (torch.zeros(10), torch.zeros(16, dtype=torch.int8), "uint8"),
        (torch.zeros(10), torch.zeros(32, dtype=torch.uint8)[::2], "contiguous"),
        (torch.zeros(10), torch.zeros(16, dtype=torch.uint8, device="meta"), "meta"),
    ],
)
def test_buffers_that_do_not_fit(flat: torch.Tensor, payload: torch.Tensor, reason: str) -> None:
    packing = Packing(segments=(Segment(offset=0, numel=10, bits=4),), dtype=torch.float32)
    with pytest.raises(ValueError, match=reason):
        check_buffers(packing, flat, payload)
