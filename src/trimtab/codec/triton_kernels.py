"""The codec on CUDA tensors, in Triton: the same bits as the reference, at memory speed.

After the first use of a packing nothing here waits for the device or allocates; launches go to the
current stream, and what they repeat is put together once (`trimtab.triton_launch`). The exception is
`reduce_encode` of payloads at irregular distances: they are first copied into one buffer.

Segments with the same bits and block form a group, and a group is one launch. A program of that launch
finds its segment through two tables: `owners`, the segment of each tile, and `table`, 8 numbers for
each segment. So it reads 4 bytes per tile, however many segments there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from trimtab.codec import triton_device, triton_raw
from trimtab.codec.contract import Kernels, Rounding
from trimtab.codec.packing import RAW, Packing, Segment
from trimtab.triton_launch import Launch

TILE = 1024
"""Elements a warp holds in registers: 32 a thread."""

MAX_WARPS = 8
"""A block longer than this many times TILE is read twice instead of held."""

RAW_WARPS = 4
"""Warps that share a tile of raw values."""


class TritonKernels(Kernels):
    name = "triton"

    def _encode(
        self,
        flat: Tensor,
        payloads: Sequence[Tensor] | None,
        packing: Packing,
        out: Tensor,
        rounding: Rounding,
    ) -> None:
        if payloads is not None and (not payloads or packing.nbytes == 0):
            # A sum of one: the rank's own values, which must still become what the others receive.
            self._encode(flat, None, packing, out, rounding)
            self._decode(out, packing, flat, add=False)
            return
        first, stride, gap = out, 0, 0
        if payloads:
            first, regular = payloads[0], spacing([payload.data_ptr() for payload in payloads])
            if regular is None:
                first, regular = torch.stack(list(payloads)), (packing.nbytes, len(payloads))
            stride, gap = regular
        wide = (out.data_ptr() | first.data_ptr() | stride) % 8 == 0
        stream, scale, stochastic = rounding
        for group in _groups(packing, flat.device):
            tensors = flat, first, out, group.owners, group.table
            if group.bits == RAW:
                launch = group.launch(triton_raw.encode_raw, flat.dtype, wide, COUNT=len(payloads or ()))
                launch(tensors, scale, stride, gap)
            else:
                own = {"STOCHASTIC": stochastic, "COUNT": len(payloads or ())}
                launch = group.launch(triton_device.encode, flat.dtype, wide, **own)
                launch(tensors, stream, scale, stride, gap)

    def _decode(self, payload: Tensor, packing: Packing, flat: Tensor, add: bool) -> None:
        wide = payload.data_ptr() % 8 == 0
        for group in _groups(packing, flat.device):
            kernel = triton_raw.decode_raw if group.bits == RAW else triton_device.decode
            launch = group.launch(kernel, flat.dtype, wide, ADD=add)
            launch((flat, payload, group.owners, group.table))


def spacing(addresses: Sequence[int]) -> tuple[int, int] | None:
    """(stride, gap) such that address i is the first + (i + (i ≥ gap)) · stride; None if there is none.

    The payloads of a reduction are the rows of one buffer without the owner's own: regular, with one gap.
    """
    count = len(addresses)
    steps = [b - a for a, b in pairwise(addresses)]
    stride = min(steps, key=abs, default=0)
    gaps = [i + 1 for i, step in enumerate(steps) if step != stride]
    if not gaps:
        return stride, count
    if len(gaps) == 1 and steps[gaps[0] - 1] == 2 * stride:
        return stride, gaps[0]
    return None


def _groups(packing: Packing, device: torch.device) -> tuple[Group, ...]:
    key = (TritonKernels, device)
    if key not in packing.prepared:
        packing.prepared[key] = groups(packing, device)
    prepared: tuple[Group, ...] = packing.prepared[key]
    return prepared


@dataclass(frozen=True, kw_only=True)
class Group:
    """Segments encoded by one launch."""

    bits: int
    block: int
    """Elements per block; for raw segments, per tile."""

    warps: int
    tiles: int
    owners: torch.Tensor
    table: torch.Tensor
    shape: dict[str, int | bool]
    """Compile-time constants. PAD: lanes a block takes, a power of two; HELD: whether they stay in registers, else
    CHUNK of them are processed at a time; ROWS: blocks per tile; UNIT: a power of two that divides every segment's
    offset (`table` holds offsets over it)."""

    launches: dict[tuple[Any, ...], Launch] = field(default_factory=dict, compare=False, repr=False)

    def constants(self, dtype: torch.dtype, wide: bool) -> dict[str, int | bool]:
        """All compile-time constants of this group; `wide`: payloads are aligned to 8 bytes."""
        if self.bits == RAW:
            return {"TILE": self.block, "UNIT": self.shape["UNIT"], "WIDE": wide}
        codes = self._codes_per_word(dtype, wide)
        return {"BITS": self.bits, "BLOCK": self.block, **self.shape, "GROUP": codes, "WIDE": wide}

    def launch(self, kernel: Any, dtype: torch.dtype, wide: bool, **own: int | bool) -> Launch:
        """The launch of this kernel on these segments, with `own` as its last constants; made once."""
        key = kernel, dtype, wide, *own.values()
        launch = self.launches.get(key)
        if launch is None:
            constants = {**self.constants(dtype, wide), **own}
            options = {"num_warps": self.warps, "enable_fp_fusion": False}
            launch = self.launches[key] = Launch(kernel, (self.tiles, 1, 1), (), constants, **options)
        return launch

    def _codes_per_word(self, dtype: torch.dtype, wide: bool) -> int:
        """Codes stored as one word: those a thread holds after a 16-byte load; 0 where codes straddle bytes."""
        if 8 % self.bits:
            return 0
        a_byte = 8 // self.bits
        a_word = max(min(16 // dtype.itemsize, 32 // self.bits), a_byte)
        # A block of whole words starts on a word; any other starts on a byte of its own.
        return a_word if wide and self.block % a_word == 0 else a_byte


def groups(packing: Packing, device: torch.device) -> tuple[Group, ...]:
    """The packing's groups, with their tables on `device`."""
    by_kind: dict[tuple[int, int], list[tuple[Segment, int]]] = {}
    for segment, start in zip(packing.segments, packing.starts, strict=True):
        if segment.numel:
            key = (RAW, TILE) if segment.bits == RAW else (segment.bits, segment.block)
            by_kind.setdefault(key, []).append((segment, start))
    return tuple(_group(*key, members, device) for key, members in by_kind.items())


def _group(bits: int, block: int, members: list[tuple[Segment, int]], device: torch.device) -> Group:
    pad = 1 << (block - 1).bit_length()
    rows = max(1, TILE // pad)
    warps = RAW_WARPS if bits == RAW else max(1, min(pad // TILE, MAX_WARPS))
    counts = [-(-segment.numel // (block * rows)) for segment, _ in members]
    unit = math.gcd(16, *(segment.offset for segment, _ in members))
    table, first = [], 0
    for (segment, start), count in zip(members, counts, strict=True):
        name = segment.name_hash - (1 << 64) if segment.name_hash >> 63 else segment.name_hash
        table.append(
            (segment.offset // unit, segment.numel, segment.first_block, name, start // 8, first, 0, 0)
        )
        first += count
    owners = torch.arange(len(members), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    chunk = min(pad, max(8, 256 * warps // rows))
    return Group(
        bits=bits,
        block=block,
        warps=warps,
        tiles=first,
        owners=owners.to(device),
        table=torch.tensor(table, dtype=torch.int64, device=device),
        shape={"PAD": pad, "ROWS": rows, "CHUNK": chunk, "HELD": pad <= TILE * MAX_WARPS, "UNIT": unit},
    )
