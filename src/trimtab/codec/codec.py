"""The codec contract: encode, decode, exact size.

A codec turns one tensor into bytes and back. The reductions in `trimtab.collectives` call the block
kernels directly, which is faster; this contract is for everything else, and what a new codec implements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import MAX_BLOCK, MIN_BLOCK, Packing, Segment
from trimtab.random_bits import name_hash


@runtime_checkable
class Codec(Protocol):
    """A way to send a tensor in fewer bytes."""

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Exact size of the encoding of a tensor of this shape and type."""

    def encode(self, values: torch.Tensor, *, name: str = "", stream: int = 0) -> torch.Tensor:
        """The encoding, as a 1-D uint8 tensor on the same device.

        `name` and `stream` (see `trimtab.random_bits.stream`) key the random numbers.
        """

    def decode(self, payload: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The values; raises ValueError when the payload's size is not `nbytes(shape, dtype)`."""


@dataclass(frozen=True)
class Block:
    """Block-wise max-min quantization, 1 to 8 bits a value (docs/wire-format.md)."""

    bits: int = 4
    block: int = 1024
    """Values that share one range: any size from 8."""

    stochastic: bool = True
    """Round up or down at random, without bias; otherwise to the nearest."""

    def __post_init__(self) -> None:
        for name, value in (("bits", self.bits), ("block", self.block)):
            if not hasattr(value, "__index__"):
                raise ValueError(f"Block: {name} must be a whole number, got {value!r}")
        if not 1 <= self.bits <= 8:
            raise ValueError(f"Block: bits must be 1 to 8, got {self.bits}")
        if not MIN_BLOCK <= self.block <= MAX_BLOCK:
            raise ValueError(f"Block: block must be {MIN_BLOCK} to {MAX_BLOCK} values, got {self.block}")

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return self._packing(shape.numel(), dtype, "").nbytes

    def encode(self, values: torch.Tensor, *, name: str = "", stream: int = 0) -> torch.Tensor:
        packing = self._packing(values.numel(), values.dtype, name)
        out = torch.empty(packing.nbytes, dtype=torch.uint8, device=values.device)
        flat = values.contiguous().view(-1)
        kernels_for(values.device).encode(flat, packing, out, stream=stream, stochastic=self.stochastic)
        return out

    def decode(self, payload: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        flat = torch.empty(shape.numel(), dtype=dtype, device=payload.device)
        kernels_for(payload.device).decode(payload, self._packing(shape.numel(), dtype, ""), flat)
        return flat.view(shape)

    def _packing(self, numel: int, dtype: torch.dtype, name: str) -> Packing:
        whole = Segment(offset=0, numel=numel, bits=self.bits, block=self.block, name_hash=name_hash(name))
        return Packing(segments=(whole,), dtype=dtype)


@dataclass(frozen=True)
class Uncompressed:
    """Sends the values as they are: the baseline, and the codec of small parameters."""

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return shape.numel() * dtype.itemsize

    def encode(self, values: torch.Tensor, *, name: str = "", stream: int = 0) -> torch.Tensor:
        return values.contiguous().view(-1).view(torch.uint8).clone()

    def decode(self, payload: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        check_size(self, payload, shape, dtype)
        return payload.view(dtype).view(shape).clone()


def check_size(codec: Codec, payload: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    """Refuse a payload of another size than `nbytes`."""
    expected = codec.nbytes(shape, dtype)
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() != expected:
        raise ValueError(
            f"{codec}: wrong payload: found {payload.dtype} of shape {tuple(payload.shape)}, expected {expected} bytes"
        )
