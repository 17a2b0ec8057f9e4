"""Inside a host: exact reduce-scatter and all-gather of uneven shards.

Rank r of the host owns elements cuts[r] to cuts[r + 1] of a bucket. Sums run in rank order, in fp32: Gloo, NCCL
and shared memory give the same bits.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.collectives.reduction import carried, started

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trimtab.collectives.shared_memory import SharedMemory


class IntraHost(Protocol):
    """Collectives of a host's ranks; as in a `Reduction`, each yields what it has started."""

    rank: int
    """Index of this rank on its host."""

    world: int

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[int], scale: float) -> Iterator[dist.Work]:
        """Leave each rank with the sums of `scale` × `flat` in what it owns; the rest is undefined."""

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[int]) -> Iterator[dist.Work]:
        """Copy what each rank owns to all."""

    def close(self) -> None:
        """Release what is held; the other ranks must not wait for this one any more."""


class GroupIntraHost:
    """Over process groups of the host's ranks: one for each collective, since they run in different threads."""

    def __init__(self, scatter: dist.ProcessGroup, gather: dist.ProcessGroup) -> None:
        self._scatter, self._gather = scatter, gather
        self.rank, self.world = dist.get_rank(scatter), dist.get_world_size(scatter)

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[int], scale: float) -> Iterator[dist.Work]:
        """1. all-to-all of the scaled values; add what arrived."""
        if scale != 1.0:
            flat.mul_(scale)
        sizes = [end - start for start, end in pairwise(cuts)]
        own = flat[cuts[self.rank] : cuts[self.rank + 1]]
        arrived = torch.empty(self.world * own.numel(), dtype=flat.dtype, device=flat.device)
        yield started(
            dist.all_to_all_single(
                arrived,
                flat[cuts[0] : cuts[-1]],
                [own.numel()] * self.world,
                sizes,
                group=self._scatter,
                async_op=True,
            )
        )
        carried(arrived)
        if own.numel():
            rows = arrived.view(self.world, -1)
            total = rows[0].float() if flat.dtype in (torch.float16, torch.bfloat16) else rows[0]
            for row in rows[1:]:
                total += row
            own.copy_(total)

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[int]) -> Iterator[dist.Work]:
        """1. all-gather of the shards, as long as the longest."""
        longest = max(end - start for start, end in pairwise(cuts))
        mine = torch.zeros(longest, dtype=flat.dtype, device=flat.device)
        own = flat[cuts[self.rank] : cuts[self.rank + 1]]
        mine[: own.numel()] = own
        gathered = torch.empty(self.world * longest, dtype=flat.dtype, device=flat.device)
        yield started(all_gather_single(gathered, mine, self._gather, async_op=True))
        carried(gathered, mine)
        for rank, (start, end) in enumerate(pairwise(cuts)):
            if rank != self.rank:
                flat[start:end] = gathered[rank * longest : rank * longest + end - start]

    def close(self) -> None:
        """Does nothing: the groups end with the job."""


class SharedMemoryIntraHost:
    """Over shared memory: a segment for each collective, since they run in different threads. Both block."""

    def __init__(self, scatter: SharedMemory, gather: SharedMemory) -> None:
        self._scatter, self._gather = scatter, gather
        self.rank, self.world = scatter.rank, scatter.world

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[int], scale: float) -> Iterator[dist.Work]:
        self._scatter.reduce_scatter(flat, cuts, scale=scale)
        yield from ()

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[int]) -> Iterator[dist.Work]:
        self._gather.all_gather(flat, cuts)
        yield from ()

    def close(self) -> None:
        self._scatter.close()
        self._gather.close()
