"""Payloads in the host's memory are those of the kernels that made them."""

from __future__ import annotations

import torch

from trimtab.codec.host_payloads import HostPayloads
from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import RAW, Packing, Segment

PACKING = Packing(
    segments=(
        Segment(offset=0, numel=300, bits=4, block=128, name_hash=1),
        Segment(offset=300, numel=20, bits=RAW),
    ),
    dtype=torch.float32,
)


def test_payloads_and_values_are_those_of_the_kernels_inside() -> None:
    inside = kernels_for(torch.device("cpu"))
    staged = HostPayloads(inside)
    flat = torch.randn(320, generator=torch.Generator().manual_seed(0))
    own, expected = (torch.zeros(PACKING.nbytes, dtype=torch.uint8) for _ in range(2))
    staged.encode(flat, PACKING, own, stream=3, scale=0.5)
    inside.encode(flat, PACKING, expected, stream=3, scale=0.5)
    assert torch.equal(own, expected)
    sums = [flat.clone(), flat.clone()]
    for kernels, values, out in zip((staged, inside), sums, (own, expected), strict=True):
        payload = out.clone()
        kernels.decode(payload, PACKING, values, add=True)
        kernels.reduce_encode(values, [payload, payload], PACKING, out, stream=4)
        kernels.decode(payload, PACKING, values[:320], add=True)
    assert torch.equal(own, expected)
    assert torch.equal(*sums)
