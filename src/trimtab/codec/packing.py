"""The layout of encoded parameters: segments of a flat buffer, and the payload they become.

A `Packing` is made once for a bucket and applied every step. Its sizes are exact:
see docs/wire-format.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from trimtab.wire_format import encoded_bytes

RAW = 0
"""The `bits` of a segment that travels uncompressed."""

MIN_BLOCK = 8
MAX_BLOCK = 2**31 - 1
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of one parameter inside a flat buffer, starting on one of its block boundaries."""

    offset: int
    """First element in the flat buffer."""

    numel: int
    bits: int
    """Bits per value, 1 to 8; 0 (`RAW`) sends the values as they are."""

    block: int = 1024
    """Values that share one (low, unit) pair."""

    name_hash: int = 0
    """`name_hash` of the parameter."""

    first_block: int = 0
    """Index, within the parameter, of this segment's first block."""

    def __post_init__(self) -> None:
        if not 0 <= self.bits <= 8:
            raise ValueError(f"bits must be 1 to 8, or 0 for raw; got {self.bits}")
        if not MIN_BLOCK <= self.block <= MAX_BLOCK:
            raise ValueError(f"block must be {MIN_BLOCK} to {MAX_BLOCK} elements; got {self.block}")
        if self.offset < 0 or self.numel < 0 or self.first_block < 0:
            raise ValueError(f"offset, numel and first_block cannot be negative; got {self}")

    @property
    def span(self) -> slice:
        """The segment's elements of the flat buffer."""
        return slice(self.offset, self.offset + self.numel)

    @property
    def blocks(self) -> int:
        return -(-self.numel // self.block)

    def nbytes(self, itemsize: int) -> int:
        """Exact size of this segment's encoding, in a buffer of elements of `itemsize` bytes."""
        return encoded_bytes(self.numel, self.bits, self.block, itemsize=itemsize)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Segments of a flat buffer of one type, and the layout of their payload."""

    segments: tuple[Segment, ...]
    dtype: torch.dtype
    starts: tuple[int, ...] = field(init=False)
    """Byte at which each segment's encoding begins in the payload."""

    nbytes: int = field(init=False)
    """Exact size of the payload."""

    extent: int = field(init=False)
    """The least number of elements of a flat buffer."""

    prepared: dict[Any, Any] = field(init=False, default_factory=dict, compare=False, repr=False)
    """What kernels derive from the segments (descriptor arrays, device tables), each under its own key."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"values must be fp32, fp16 or bf16; got {self.dtype}")
        starts, at = [], 0
        for segment in self.segments:
            starts.append(at)
            at += segment.nbytes(self.dtype.itemsize)
        object.__setattr__(self, "starts", tuple(starts))
        object.__setattr__(self, "nbytes", at)
        object.__setattr__(self, "extent", max((s.offset + s.numel for s in self.segments), default=0))


def check_buffers(packing: Packing, flat: torch.Tensor, *payloads: torch.Tensor) -> None:
    """Refuse buffers that do not fit the packing, before any byte is accessed."""
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(f"the flat buffer must be 1-D and contiguous; got shape {tuple(flat.shape)}")
    if flat.dtype != packing.dtype:
        raise ValueError(f"the packing is for {packing.dtype} values; the flat buffer holds {flat.dtype}")
    if flat.numel() < packing.extent:
        raise ValueError(f"the packing reaches element {packing.extent}; the flat buffer has {flat.numel()}")
    for payload in payloads:
        if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
            raise ValueError(
                f"a payload is a contiguous 1-D uint8 tensor; got {payload.dtype} {tuple(payload.shape)}"
            )
        if payload.numel() != packing.nbytes:
            raise ValueError(f"wrong payload size: found {payload.numel()} bytes, expected {packing.nbytes}")
        if payload.device != flat.device:
            raise ValueError(f"the payload is on {payload.device}, the values on {flat.device}")
