"""Reduction in two levels: exact inside each host, compressed between the hosts.

The traffic between two hosts shrinks by the number of ranks on a host, and every local rank sends a shard of it,
so that no connection is idle. Inside a host, rank r owns elements cuts[r] to cuts[r + 1] of a bucket. Sums run in
rank order, in fp32: Gloo, NCCL and shared memory give the same bits.

Where hosts have different numbers of ranks there are as many shards as the smallest host has ranks, and the other
ranks of a larger host own nothing. The time between hosts is the same as with more shards: on the smallest host
each rank encodes and sends a shard of that size either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.codec.error_feedback import ErrorFeedback
from trimtab.codec.packing import RAW
from trimtab.collectives.groups import backend_kind, destroy_groups, private_groups
from trimtab.collectives.layout import Piece, plan_layout
from trimtab.collectives.reduction import STAGE_GROUPS, Reduction, Works, carried, started
from trimtab.collectives.shared_memory import SharedMemory
from trimtab.collectives.topology import Hosts, find_hosts
from trimtab.environment import logger
from trimtab.errors import TrimtabError


class GroupIntraHost:
    """Over process groups of the host's ranks: one for each collective, since they run in different threads.

    As in a `Reduction`, each collective yields what it has started.
    """

    def __init__(self, scatter: dist.ProcessGroup, gather: dist.ProcessGroup) -> None:
        self._scatter, self._gather = scatter, gather
        self.rank, self.world = dist.get_rank(scatter), dist.get_world_size(scatter)

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[int], scale: float) -> Iterator[dist.Work]:
        """Leave each rank with the sums of `scale` × `flat` in what it owns; the rest is undefined.

        1. all-to-all of the scaled values; add what arrived.
        """
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
        """Copy what each rank owns to all.

        1. all-gather of the shards, as long as the longest.
        """
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
        self.world = scatter.world

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[int], scale: float) -> Iterator[dist.Work]:
        self._scatter.reduce_scatter(flat, cuts, scale=scale)
        yield from ()

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[int]) -> Iterator[dist.Work]:
        self._gather.all_gather(flat, cuts)
        yield from ()

    def all_reduce(self, flat: torch.Tensor, scale: float) -> None:
        """Both at once, round by round, while the values are in the processor's cache."""
        self._scatter.all_reduce(flat, scale=scale)

    def close(self) -> None:
        self._scatter.close()
        self._gather.close()


IntraHost = GroupIntraHost | SharedMemoryIntraHost


class Hierarchy:
    """How the ranks of a group reduce inside their hosts and between them, for all buckets of a job.

    Collective: every rank of the group constructs one at the same point.

    Args:
        hosts: which ranks share a host; detected when None.
        shared_memory: reduce inside a host through shared memory, otherwise over process groups.

    Raises:
        TrimtabError: when the ranks form no hierarchy (`Hosts.flat_reason`), or shared memory is not available.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        hosts: Hosts | None = None,
        shared_memory: bool = True,
    ) -> None:
        self.hosts = hosts or find_hosts(group, device)
        reason = self.hosts.flat_reason()
        if reason is not None:
            raise TrimtabError(f"no hierarchy: {reason}; reduce flat over all ranks")
        rank = dist.get_rank(group)
        self.host, self.index = self.hosts.seat(rank)
        members = self.hosts.ranks[self.host]
        self.shared_memory = shared_memory
        self.inside: IntraHost
        if shared_memory:
            segments = [SharedMemory(group, device, members=members) for _ in range(2)]
            self.inside = SharedMemoryIntraHost(*segments)
        else:
            self.inside = GroupIntraHost(*private_groups(group, device, 2, ranks=members))
        self.between: tuple[dist.ProcessGroup, ...] = ()
        if self.hosts.count > 1:
            peers = self.hosts.peers(rank)
            self.between = private_groups(group, device, STAGE_GROUPS, ranks=peers, overlapped=True)

    def shard(self, pieces: Sequence[Piece], dtype: torch.dtype) -> Shard:
        """This rank's part of a bucket; nothing for a rank beyond the number of shards."""
        every = shards(pieces, dtype, self.hosts.shards)
        cuts = every[0].cuts + every[0].cuts[-1:] * (self.inside.world - len(every))
        return Shard(cuts=cuts, pieces=every[self.index].pieces if self.index < len(every) else ())

    def close(self) -> None:
        """Release shared memory and groups; the reductions must not be used after this."""
        self.inside.close()
        destroy_groups(self.between)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What one local rank reduces with its peers on the other hosts."""

    cuts: tuple[int, ...]
    """Rank r of the host owns elements cuts[r] to cuts[r + 1] of the bucket."""

    pieces: tuple[Piece, ...]
    """The parts of parameters in it; their blocks, and so their codes, are those of the whole parameter."""


def shards(pieces: Sequence[Piece], dtype: torch.dtype, count: int) -> list[Shard]:
    """Cut a bucket among the ranks of a host: about equal payloads, at block boundaries."""
    ordered = sorted((piece for piece in pieces if piece.numel), key=lambda piece: piece.offset)
    layout = plan_layout(ordered, dtype, count)
    cuts = [max((piece.offset + piece.numel for piece in ordered), default=0)]
    for chunk in reversed(layout.chunks):
        cuts.insert(0, chunk.segments[0].offset if chunk.segments else cuts[0])
    cuts[0] = 0
    return [Shard(cuts=tuple(cuts), pieces=part) for part in layout.parts]


class SharedReduction:
    """Reduces one bucket of ranks that are all on one host: exactly, through shared memory."""

    def __init__(self, inside: SharedMemoryIntraHost) -> None:
        self._inside = inside

    def steps(self, flat: torch.Tensor, *, step: int, scale: float) -> Iterator[dist.Work]:
        """1. all-reduce inside the host."""
        yield _WhenWaitedFor(partial(self._inside.all_reduce, flat, scale))


class _WhenWaitedFor(dist.Work):
    """A blocking exchange: it runs where a collective would be waited for, so that its time counts as that."""

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__()
        self._run = run

    def wait(self, timeout: Any = None) -> bool:
        self._run()
        return True


class HierarchicalReduction:
    """Reduces one bucket in two levels.

    `between` reduces this rank's shard with its peers; None where there is nothing to do: on one host, for a rank
    that owns no shard, or for an empty shard, which is empty for all peers.
    """

    def __init__(
        self,
        inside: IntraHost,
        shard: Shard,
        between: Reduction | None,
        *,
        pieces: Sequence[Piece],
        feedback: ErrorFeedback | None = None,
        residuals: ShardFeedback | None = None,
    ) -> None:
        self._inside, self._shard, self._between = inside, shard, between
        self._pieces = [piece for piece in pieces if piece.bits != RAW]
        self._feedback, self._residuals = feedback, residuals

    def steps(self, flat: torch.Tensor, *, step: int, scale: float) -> Iterator[dist.Work]:
        """1. inside the host: reduce-scatter, exact.
        2. between hosts: the compressed reduction of my shard, with my peers.
        3. inside the host: all-gather.
        """
        if self._feedback is not None:
            if scale != 1.0:
                flat.mul_(scale)
                scale = 1.0
            for piece in self._pieces:
                self._feedback.restore(piece.name, flat[piece.span])
        yield from self._inside.reduce_scatter(flat, self._shard.cuts, scale)
        stages = 0
        if self._between is not None:
            for work in self._between.steps(flat, step=step, scale=1.0):
                stages += 1
                yield work
        # The gather below must run in the same thread for every bucket, or ranks would start theirs in
        # different orders.
        for _ in range(stages, STAGE_GROUPS):
            yield Works(flat.device)
        if self._feedback is not None:
            self._keep(self._feedback, flat)
        yield from self._inside.all_gather(flat, self._shard.cuts)

    def _keep(self, feedback: ErrorFeedback, flat: torch.Tensor) -> None:
        """Only this rank's encodings left something out: what others encode reached them exactly."""
        parts = {} if self._residuals is None else self._residuals.parts
        starts = {part.name: part.offset for part in self._shard.pieces}
        for piece in self._pieces:
            residual = torch.zeros(piece.numel, dtype=torch.float32, device=flat.device)
            nothing = torch.zeros_like(residual)
            if piece.name in parts:
                part = parts[piece.name]
                first = starts[piece.name] - piece.offset
                residual[first : first + part.numel()] = part
            feedback.keep(piece.name, residual, nothing)


class ShardFeedback(ErrorFeedback):
    """Collects what the reduction of a shard left out; the hierarchy adds it back in the next step.

    Each rank adds what it holds before the reduce-scatter, so that nothing is lost when DDP's rebuilt buckets
    cut a parameter elsewhere and another rank owns the values from then on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, torch.Tensor] = {}

    def restore(self, name: str, values: torch.Tensor) -> None:
        """Does nothing: it was added before the values were reduced inside the host."""

    def keep(self, name: str, target: torch.Tensor, sent: torch.Tensor) -> None:
        self.parts[name] = target.float() - sent.float()


def one_host(group: dist.ProcessGroup, device: torch.device) -> Hierarchy | None:
    """The shared memory of a Gloo group whose ranks are all on one host; None for any other group. Collective.

    NCCL has its own ways inside a host.
    """
    if device.type != "cpu" or group.size() == 1 or backend_kind(group, device) != "gloo":
        return None
    hosts = find_hosts(group, device)
    if hosts.count > 1:
        return None
    try:
        return Hierarchy(group, device, hosts=hosts)
    except TrimtabError as error:  # the same on every rank
        if group.rank() == 0:
            logger().info("ranks of one host exchange over sockets: %s", error)
        return None
