"""Reduction around a ring: each rank talks to its two neighbors only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.collectives.block import BlockReduction
from trimtab.collectives.reduction import started, together
from trimtab.random_bits import OWN, REDUCED, stream

if TYPE_CHECKING:
    from collections.abc import Iterator


class Ring(BlockReduction):
    """Chunk c starts at rank c + 1 and travels around the ring; each rank adds its values; rank c owns the sum.

    Every value is encoded by every rank on the way, so the error grows with W. It needs the least memory, and each
    chunk crosses a host's link once, however many ranks the host has. Payload sent per rank: 2 (W - 1) / W of the
    bucket's.
    """

    def _allocate(self) -> None:
        chunks = self._layout.chunks
        assert self._world == len(chunks)
        row = max(chunk.nbytes for chunk in chunks)
        self._leaving, self._arriving = self._bytes(row), self._bytes(row)
        self._sums, self._gathered = self._bytes(row), self._bytes(self._world * row)

    def steps(self, flat: torch.Tensor, *, step: int, scale: float) -> Iterator[dist.Work]:
        """1. W - 1 hops: add my values to the chunk that arrived, encode, send it on.
        2. my own chunk has arrived: add, encode the sums, keep their decoded form; all-gather.
        3. decode the other owners' sums.
        """
        chunks, world, rank = self._layout.chunks, self._world, self._rank
        scale, target = self._restore(flat, scale)
        # Each rank encodes each chunk once, so one stream serves all hops.
        key = stream(self._seed, step, rank, OWN)
        received: list[torch.Tensor] = []
        last = together(flat)
        for hop in range(world - 1):
            last.wait()
            chunk, coming = chunks[(rank - 1 - hop) % world], chunks[(rank - 2 - hop) % world]
            leaving, arriving = self._leaving[: chunk.nbytes], self._arriving[: coming.nbytes]
            self._encode_sum(flat, received, chunk, leaving, stream=key, scale=scale, target=target)
            last = self._pass_on(leaving, arriving)
            received = [arriving]
        yield last
        own = chunks[rank]
        sums = self._sums[: own.nbytes]
        key = stream(self._seed, step, rank, REDUCED)
        self._encode_sum(flat, received, own, sums, stream=key, scale=scale, target=target)
        self._keep(target, flat)
        yield started(all_gather_single(self._gathered, self._sums, self._groups[1], async_op=True))
        self._decode_sums(self._gathered, self._sums.numel(), flat)

    def _pass_on(self, leaving: torch.Tensor, arriving: torch.Tensor) -> dist.Work:
        group, following, before = self._groups[0], (self._rank + 1) % self._world, self._rank - 1
        operations = []
        if leaving.numel():
            operations.append(dist.P2POp(dist.isend, leaving, group=group, group_peer=following))
        if arriving.numel():
            operations.append(dist.P2POp(dist.irecv, arriving, group=group, group_peer=before % self._world))
        return together(leaving, dist.batch_isend_irecv(operations) if operations else ())
