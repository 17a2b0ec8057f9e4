"""What the GPU code needs to know about a packing, built once and kept with it.

Segments with the same bits and block form a group, and a group is one launch. A program of that launch
finds its segment through two tables: `owners`, the segment of each tile, and `table`, 8 numbers for
each segment. So it reads 4 bytes per tile, however many segments there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trimtab.codec.packing import RAW

if TYPE_CHECKING:
    from trimtab.codec.packing import Packing, Segment

TILE = 1024
"""Elements a warp holds in registers: 32 a thread."""

MAX_WARPS = 8
"""A block longer than this many times TILE is read twice instead of held."""

RAW_WARPS = 4
"""Warps that share a tile of raw values."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Segments encoded by one launch."""

    bits: int
    block: int
    """Elements per block; for raw segments, per tile."""

    pad: int
    """Lanes a block takes: a power of two."""

    chunk: int
    """Lanes processed at a time in a block that is not held in registers."""

    held: bool

    rows: int
    """Blocks per tile."""

    warps: int
    tiles: int
    unit: int
    """A power of two that divides every segment's offset; `table` holds offsets over it."""

    owners: torch.Tensor
    table: torch.Tensor

    def constants(self, dtype: torch.dtype, wide: bool) -> dict[str, int | bool]:
        """Compile-time constants of this group; `wide`: payloads are aligned to 8 bytes."""
        if self.bits == RAW:
            return {"TILE": self.block, "UNIT": self.unit, "WIDE": wide}
        return {
            "BITS": self.bits,
            "BLOCK": self.block,
            "PAD": self.pad,
            "ROWS": self.rows,
            "CHUNK": self.chunk,
            "HELD": self.held,
            "UNIT": self.unit,
            "GROUP": self._codes_per_word(dtype, wide),
            "WIDE": wide,
        }

    def _codes_per_word(self, dtype: torch.dtype, wide: bool) -> int:
        """Codes stored as one word: those a thread holds after a 16-byte load; 0 where codes straddle bytes."""
        if 8 % self.bits:
            return 0
        a_byte = 8 // self.bits
        a_word = max(min(16 // dtype.itemsize, 32 // self.bits), a_byte)
        # A block of whole words starts on a word; any other starts on a byte of its own.
        return a_word if wide and self.block % a_word == 0 else a_byte


def groups(packing: Packing, device: torch.device, tile: int = TILE, warps: int = 0) -> tuple[Group, ...]:
    """The packing's groups, with their tables on `device`. `tile` and `warps` are for tuning."""
    by_kind: dict[tuple[int, int], list[tuple[Segment, int]]] = {}
    for segment, start in zip(packing.segments, packing.starts, strict=True):
        if segment.numel:
            key = (RAW, tile) if segment.bits == RAW else (segment.bits, segment.block)
            by_kind.setdefault(key, []).append((segment, start))
    return tuple(_group(*key, members, device, tile, warps) for key, members in by_kind.items())


def _group(
    bits: int, block: int, members: list[tuple[Segment, int]], device: torch.device, tile: int, warps: int
) -> Group:
    pad = 1 << (block - 1).bit_length()
    held = pad <= tile * MAX_WARPS
    rows = max(1, tile // pad)
    if not warps:
        warps = RAW_WARPS if bits == RAW else max(1, min(pad // tile, MAX_WARPS))
    counts = [-(-segment.numel // (block * rows)) for segment, _ in members]
    unit = 16
    while any(segment.offset % unit for segment, _ in members):
        unit //= 2
    table, first = [], 0
    for (segment, start), count in zip(members, counts, strict=True):
        name = segment.name_hash - (1 << 64) if segment.name_hash >> 63 else segment.name_hash
        table.append(
            (segment.offset // unit, segment.numel, segment.first_block, name, start // 8, first, 0, 0)
        )
        first += count
    owners = torch.arange(len(members), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    return Group(
        bits=bits,
        block=block,
        pad=pad,
        rows=rows,
        chunk=min(pad, max(8, 256 * warps // rows)),
        held=held,
        warps=warps,
        tiles=first,
        unit=unit,
        owners=owners.to(device),
        table=torch.tensor(table, dtype=torch.int64, device=device),
    )
