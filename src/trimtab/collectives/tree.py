"""Reduction up a binomial tree, and the sum broadcast down again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trimtab.collectives.block import BlockReduction
from trimtab.collectives.reduction import started, together
from trimtab.random_bits import OWN, REDUCED, stream

if TYPE_CHECKING:
    from collections.abc import Iterator


class Tree(BlockReduction):
    """Rank 0 is the root; the children of rank r are r + 1, r + 2, r + 4, ... below its lowest set bit.

    Every value is encoded once per level, so the error grows with log W. Latency is lowest, but the whole payload
    passes through the root's link log W times: right for small buckets on many ranks.
    """

    def _allocate(self) -> None:
        (self._whole,) = self._layout.chunks
        self._children, self._parent = family(self._rank, self._world)
        size = self._whole.nbytes
        self._own, self._received = self._bytes(size), [self._bytes(size) for _ in self._children]

    def steps(self, flat: torch.Tensor, *, step: int, scale: float) -> Iterator[dist.Work]:
        """1. receive from my children, nearest first; add, encode, send to my parent.
        2. the root keeps the decoded form of its encoded sum, and broadcasts it.
        3. decode.
        """
        group = self._groups[0]
        scale, target = self._restore(flat, scale)
        for child, payload in zip(self._children, self._received, strict=True):
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.irecv, payload, group=group, group_peer=child)]
            ):
                work.wait()
        key = stream(self._seed, step, self._rank, REDUCED if self._parent is None else OWN)
        self._encode_sum(flat, self._received, self._whole, self._own, stream=key, scale=scale, target=target)
        self._keep(target, flat)
        sending: list[dist.Work] = []
        if self._parent is not None:
            up = dist.P2POp(dist.isend, self._own, group=group, group_peer=self._parent)
            sending = dist.batch_isend_irecv([up])
        yield together(flat, sending)
        yield started(dist.broadcast(self._own, group=self._groups[1], group_src=0, async_op=True))
        if self._parent is not None:
            self._kernels.decode(self._own, self._whole, flat)


def family(rank: int, world: int) -> tuple[list[int], int | None]:
    """A rank's children, nearest first, and its parent (None: the root)."""
    children, distance = [], 1
    while rank % (2 * distance) == 0 and rank + distance < world:
        children.append(rank + distance)
        distance *= 2
    return children, None if rank == 0 else rank & (rank - 1)
