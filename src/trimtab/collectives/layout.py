"""How a bucket is split among its owners: computed once, applied every step."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from trimtab.codec.packing import Packing, Segment
from trimtab.random_bits import name_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

WIRE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One parameter inside a bucket, and how it travels."""

    name: str
    offset: int
    """First element in the bucket's flat buffer."""

    numel: int
    bits: int
    """1 to 8, or 0 (`RAW`) to send the values as they are."""

    block: int
    first_block: int = 0
    """Index, within the parameter, of the first block: nonzero where the bucket holds only a part of it."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The packings of a bucket: one chunk for each owner, in rank order."""

    pieces: tuple[Piece, ...]
    dtype: torch.dtype
    chunks: tuple[Packing, ...]


def fingerprint(*settings: object) -> int:
    """63 bits that are equal on two ranks if they would send and expect the same bytes."""
    text = repr((WIRE_VERSION, *settings))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def plan_layout(pieces: Sequence[Piece], dtype: torch.dtype, owners: int) -> Layout:
    """Cut the bucket into `owners` chunks of about equal payload, at block boundaries of the parameters.

    A parameter's blocks, and so its codes, are the same wherever the cuts fall: only who
    owns a block changes. Chunks may be empty when there are fewer blocks than owners.
    """
    assert owners >= 1
    # Cuts fall between blocks. Walk over all blocks once, and go to the next chunk as soon as
    # this one has its share of the bytes.
    sizes = [_segment(piece, 0, piece.numel).nbytes(dtype.itemsize) for piece in pieces]
    total = sum(sizes)
    chunks: list[list[Segment]] = [[] for _ in range(owners)]
    done, owner = 0.0, 0
    for piece, size in zip(pieces, sizes, strict=True):
        blocks = -(-piece.numel // piece.block)
        first = 0
        while first < blocks:
            per_block = size / blocks
            room = total * (owner + 1) / owners - done
            take = blocks - first if owner == owners - 1 else min(blocks - first, round(room / per_block))
            if take > 0:
                chunks[owner].append(_segment(piece, first, take * piece.block))
                first += take
                done += take * per_block
            if first < blocks:
                owner += 1
    packings = tuple(Packing(segments=tuple(segments), dtype=dtype) for segments in chunks)
    return Layout(pieces=tuple(pieces), dtype=dtype, chunks=packings)


def _segment(piece: Piece, first_block: int, numel: int) -> Segment:
    start = first_block * piece.block
    return Segment(
        offset=piece.offset + start,
        numel=min(numel, piece.numel - start),
        bits=piece.bits,
        block=piece.block,
        name_hash=name_hash(piece.name),
        first_block=piece.first_block + first_block,
    )
