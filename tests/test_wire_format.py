"""Sizes on the wire, against what the codec writes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.codec import Block, Uncompressed
from trimtab.wire_format import encoded_bytes


@given(
    numel=st.integers(0, 5000), bits=st.integers(1, 8), block=st.one_of(st.integers(8, 1100), st.just(1024))
)
@settings(max_examples=60)
def test_sizes_are_those_of_encoded_payloads(numel: int, bits: int, block: int) -> None:
    assert encoded_bytes(numel, bits, block) == Block(bits, block).encode(torch.zeros(numel)).numel()
    raw = Uncompressed().encode(torch.zeros(numel)).numel()
    assert raw <= encoded_bytes(numel, 0, block) < raw + 8


def test_sizes_do_not_overflow_above_32_bits() -> None:
    assert encoded_bytes(3_000_000_000, 8) == 3_000_000_000 + 8 * -(-3_000_000_000 // 1024)
    assert encoded_bytes(3_000_000_000, 0) == 12_000_000_000
