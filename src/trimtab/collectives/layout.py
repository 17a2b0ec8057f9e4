"""How a bucket is split among its owners: computed once, applied every step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import torch

from trimtab.codec.packing import Packing, Segment
from trimtab.random_bits import name_hash

WIRE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Piece(Segment):
    """A parameter, or a run of its blocks, inside a bucket, and how it travels."""

    name: str

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "name_hash", name_hash(self.name))

    def part(self, first_block: int, blocks: int) -> Piece:
        """Some of its blocks, the first of them counted from the start of the piece."""
        start = first_block * self.block
        return replace(
            self,
            offset=self.offset + start,
            numel=min(blocks * self.block, self.numel - start),
            first_block=self.first_block + first_block,
        )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The packings of a bucket: one chunk for each owner, in rank order."""

    pieces: tuple[Piece, ...]
    parts: tuple[tuple[Piece, ...], ...]
    """What each owner has of them."""

    dtype: torch.dtype
    chunks: tuple[Packing, ...]
    spared: bool = False
    """Whether some of the owners own nothing, so that chunks have very unequal sizes."""


def fingerprint(*settings: object) -> int:
    """63 bits that are equal on two ranks if they would send and expect the same bytes."""
    text = repr((WIRE_VERSION, *settings))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def plan_layout(
    pieces: Sequence[Piece], dtype: torch.dtype, owners: int, spared: Collection[int] = ()
) -> Layout:
    """Cut the bucket into `owners` chunks of about equal payload, at block boundaries of the parameters.

    A parameter's blocks, and so its codes, are the same wherever the cuts fall: only who
    owns a block changes. Chunks are empty for those who are `spared`, and may be when there are fewer blocks than
    owners.
    """
    owning = [owner for owner in range(owners) if owner not in spared]
    assert owning
    # Cuts fall between blocks. Walk over all blocks once, and go to the next chunk as soon as
    # this one has its share of the bytes.
    sizes = [piece.nbytes(dtype.itemsize) for piece in pieces]
    total = sum(sizes)
    chunks: list[list[Piece]] = [[] for _ in range(owners)]
    done, place = 0.0, 0
    for piece, size in zip(pieces, sizes, strict=True):
        blocks, first = piece.blocks, 0
        while first < blocks:
            per_block = size / blocks
            room = total * (place + 1) / len(owning) - done
            is_last = place == len(owning) - 1
            take = blocks - first if is_last else min(blocks - first, round(room / per_block))
            if take > 0:
                chunks[owning[place]].append(piece.part(first, take))
                first += take
                done += take * per_block
            if first < blocks:
                place += 1
    parts = tuple(tuple(chunk) for chunk in chunks)
    packings = tuple(Packing(segments=part, dtype=dtype) for part in parts)
    spares = len(owning) < owners
    return Layout(pieces=tuple(pieces), parts=parts, dtype=dtype, chunks=packings, spared=spares)
