"""What the GPU code needs to know about a packing, built once and kept with it.

Segments with the same bits and block form a group, and a group is one launch. A program of that launch
finds its segment through two tables: `owners`, the segment of each tile, and `table`, 8 numbers for
each segment. So it reads 4 bytes per tile, however many segments there are.
"""

from __future__ import annotations

import math
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

    warps: int
    tiles: int
    owners: torch.Tensor
    table: torch.Tensor
    shape: dict[str, int | bool]
    """Compile-time constants. PAD: lanes a block takes, a power of two; HELD: whether they stay in registers, else
    CHUNK of them are processed at a time; ROWS: blocks per tile; UNIT: a power of two that divides every segment's
    offset (`table` holds offsets over it)."""

    def constants(self, dtype: torch.dtype, wide: bool) -> dict[str, int | bool]:
        """All compile-time constants of this group; `wide`: payloads are aligned to 8 bytes."""
        if self.bits == RAW:
            return {"TILE": self.block, "UNIT": self.shape["UNIT"], "WIDE": wide}
        codes = self._codes_per_word(dtype, wide)
        return {"BITS": self.bits, "BLOCK": self.block, **self.shape, "GROUP": codes, "WIDE": wide}

    def options(self, dtype: torch.dtype, wide: bool) -> dict[str, int | bool]:
        """The constants, and how to launch."""
        return {**self.constants(dtype, wide), "num_warps": self.warps, "enable_fp_fusion": False}

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
