"""Reduction by halves: partners exchange ever shorter halves of the bucket, and the sums in ever longer ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from trimtab.codec.packing import Packing
from trimtab.collectives.block import BlockReduction
from trimtab.collectives.reduction import Works
from trimtab.random_bits import OWN, REDUCED, stream


def owners(world: int) -> int:
    """The largest power of two of ranks; each of them owns a chunk."""
    return 1 << world.bit_length() - 1


class Halving(BlockReduction):
    """Each rank keeps one half of what it holds and sends the other to a partner, until it holds its own chunk.

    Messages, calls of the codec and encodings of a value grow with log W only, and no more bytes are sent than around
    a ring: right for many hosts. Ranks beyond a power of two hand their values to a partner first, and get the sums
    from it. Payload sent per rank: 2 (P - 1) / P of the bucket's among P ranks.
    """

    def _allocate(self) -> None:
        chunks = self._layout.chunks
        self._count = len(chunks)
        assert self._count == owners(self._world)
        ends = [0]
        for chunk in chunks:
            ends.append(ends[-1] + chunk.nbytes)
        self._ends = ends
        self._all = self._packing(0, self._count)
        self._leaving, self._arriving, self._sums = (self._bytes(self._all.nbytes) for _ in range(3))
        self._halves: list[tuple[int, int, int]] = []
        """Of each round: the distance to the partner, and the chunks that are kept."""
        first, distance = 0, self._count // 2
        while distance:
            first += self._rank & distance
            self._halves.append((distance, first, first + distance))
            distance //= 2
        self._packings = [
            (self._packing(first ^ distance, (first ^ distance) + distance), self._packing(first, last))
            for distance, first, last in self._halves
        ]

    def steps(self, flat: torch.Tensor, *, step: int, scale: float) -> Iterator[dist.Work]:
        """1. log W rounds: encode the half that is not mine, exchange it with my partner, add what arrived.
        2. encode the sums of my chunk; log W rounds: exchange the sums collected so far with my partner.
        3. decode all sums.
        """
        rank, count, kernels = self._rank, self._count, self._kernels
        scale, target = self._restore(flat, scale)
        if scale != 1.0:
            flat.mul_(scale)
        # Each rank encodes each value once on the way, so one stream serves all rounds.
        key = stream(self._seed, step, rank, OWN)
        if rank >= count:
            yield from self._hand_over(flat, target, key)
            return
        guest = rank + count if rank + count < self._world else None
        if guest is not None:
            self._transfer(0, receive=(self._arriving, guest)).wait()
            kernels.decode(self._arriving, self._all, flat, add=True)
        for (distance, _, _), (theirs, mine) in zip(self._halves, self._packings, strict=True):
            leaving, arriving = self._leaving[: theirs.nbytes], self._arriving[: mine.nbytes]
            self._encode(flat, theirs, leaving, key, target)
            self._transfer(0, (leaving, rank ^ distance), (arriving, rank ^ distance)).wait()
            kernels.decode(arriving, mine, flat, add=True)
        yield Works(self._device)
        own = self._layout.chunks[rank]
        key = stream(self._seed, step, rank, REDUCED)
        self._encode(flat, own, self._part(rank, rank + 1), key, target)
        self._keep(target, flat)
        for distance, first, end in reversed(self._halves):
            other = first ^ distance
            sent, received = self._part(first, end), self._part(other, other + distance)
            self._transfer(1, (sent, rank ^ distance), (received, rank ^ distance)).wait()
        yield Works(self._device) if guest is None else self._transfer(1, (self._sums, guest))
        kernels.decode(self._sums, self._all, flat)

    def _hand_over(self, flat: torch.Tensor, target: torch.Tensor | None, key: int) -> Iterator[dist.Work]:
        partner = self._rank - self._count
        self._encode(flat, self._all, self._leaving, key, target)
        self._keep(target, flat)
        yield self._transfer(0, (self._leaving, partner))
        yield self._transfer(1, receive=(self._sums, partner))
        self._kernels.decode(self._sums, self._all, flat)

    def _encode(
        self, flat: torch.Tensor, packing: Packing, out: torch.Tensor, key: int, target: torch.Tensor | None
    ) -> None:
        if target is not None:
            self._encode_sum(flat, (), packing, out, stream=key, scale=1.0, target=target)
        else:
            self._kernels.encode(flat, packing, out, stream=key, stochastic=self._stochastic)

    def _packing(self, first: int, last: int) -> Packing:
        segments = [segment for chunk in self._layout.chunks[first:last] for segment in chunk.segments]
        return Packing(segments=tuple(segments), dtype=self._layout.dtype)

    def _part(self, first: int, last: int) -> torch.Tensor:
        """Where the sums of these chunks are."""
        return self._sums[self._ends[first] : self._ends[last]]
