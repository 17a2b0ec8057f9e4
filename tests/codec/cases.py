"""Packings, buffers and values for the codec's tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from hypothesis import strategies as st

from trimtab.codec.packing import DTYPES, Packing, Segment
from trimtab.random_bits import name_hash, stream

BLOCKS = (8, 9, 13, 100, 1000, 1024, 4096, 5000)
SPECIAL = (
    *(0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e-45, -1e-45, 1.1754944e-38),
    *(3.4e38, -3.4e38, 6e-8, 65504.0, -65504.0, 1e-30, 1e30),
)
VALUES = ("normal", "special", "subnormal", "flat", "wide", "bits")


def values(kind: str, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values of one kind, always the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(numel, generator=generator)
    if kind == "special":
        chosen = torch.randint(len(SPECIAL), (numel,), generator=generator)
        rare = torch.rand(numel, generator=generator) < 0.002
        return torch.where(rare, torch.tensor(SPECIAL)[chosen], noise).to(dtype)
    if kind == "subnormal":
        return (noise * 1e-38 * torch.finfo(dtype).tiny / torch.finfo(torch.float32).tiny).to(dtype)
    if kind == "flat":
        return torch.full((numel,), float(noise[0]) if numel else 0.0, dtype=dtype)
    if kind == "wide":
        return (noise * 10 ** (torch.rand(numel, generator=generator) * 70 - 35)).to(dtype)
    if kind == "bits":
        data = torch.randint(256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        return data.view(dtype)
    return noise.to(dtype)


def payload(nbytes: int, seed: int, shift: int = 0) -> torch.Tensor:
    """Random bytes, `shift` bytes out of alignment."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (shift + nbytes,), generator=generator, dtype=torch.uint8)[shift:]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, but for which NaN a NaN is."""
    integers = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return bool(((a.view(integers) == b.view(integers)) | (a.isnan() & b.isnan())).all())


class Keywords(TypedDict):
    stream: int
    scale: float
    stochastic: bool


@dataclass(frozen=True)
class Case:
    """One call: a packing, the values of its flat buffer, and how the buffers lie."""

    packing: Packing
    flat: torch.Tensor
    peers: tuple[torch.Tensor, ...]
    out_shift: int
    stream: int
    scale: float
    stochastic: bool

    @property
    def keywords(self) -> Keywords:
        return {"stream": self.stream, "scale": self.scale, "stochastic": self.stochastic}

    def out(self) -> torch.Tensor:
        return payload(self.packing.nbytes, 99, self.out_shift)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any case: all widths, types and block sizes, several segments with gaps, buffers out of alignment."""
    dtype = draw(st.sampled_from(DTYPES))
    segments, at = [], 0
    for i in range(draw(st.integers(1, 3))):
        at += draw(st.integers(0, 3))
        block = draw(st.sampled_from(BLOCKS))
        sizes = st.one_of(st.integers(0, 70), st.integers(0, 3 * block), st.just(block), st.just(2 * block))
        segment = Segment(
            offset=at,
            numel=draw(sizes),
            bits=draw(st.integers(0, 8)),
            block=block,
            name_hash=name_hash(f"layer.{i}"),
            first_block=draw(st.sampled_from((0, 1, 2**40))),
        )
        segments.append(segment)
        at += segment.numel
    packing = Packing(segments=tuple(segments), dtype=dtype)
    seed, shift = draw(st.integers(0, 2**32)), draw(st.integers(0, 3))
    flat = values(draw(st.sampled_from(VALUES)), packing.extent + shift, dtype, seed)[shift:]
    peers = [
        payload(packing.nbytes, seed + i, draw(st.integers(0, 7))) for i in range(draw(st.integers(0, 2)))
    ]
    return Case(
        packing,
        flat,
        tuple(peers),
        draw(st.integers(0, 7)),
        stream(seed, 1, 2, 0),
        draw(st.sampled_from((1.0, 0.25, -0.3, 1e-3, 1e30))),
        draw(st.booleans()),
    )
