"""Reduction in two levels: exact inside each host, compressed between the hosts.

What crosses between two hosts shrinks by the number of ranks on a host, and every local rank carries a shard of
it, so that no connection is idle.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trimtab.codec.error_feedback import ErrorFeedback
from trimtab.codec.packing import RAW
from trimtab.collectives.groups import destroy_groups, private_groups
from trimtab.collectives.intra_host import GroupInside, Inside, SharedInside
from trimtab.collectives.layout import Piece, plan_layout
from trimtab.collectives.reduction import MAX_STAGES, PlainReduction, Reduction, together
from trimtab.collectives.shared_memory import TIMEOUT_S, SharedMemory
from trimtab.collectives.topology import Hosts, find_hosts
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Hierarchy:
    """How the ranks of a group reduce inside their hosts and between them; serves all buckets of a job.

    Collective: every rank of the group makes one at the same point.

    Args:
        hosts: which ranks share a host; found out when None.
        shared_memory: inside a host through shared memory, otherwise over process groups.
        segment_bytes: of each of the two shared segments; a default that suits the device when None.
        timeout_s: how long shared memory waits for a rank that lives.

    Raises:
        TrimtabError: when the ranks have no hierarchy (`Hosts.flat_reason`), or shared memory cannot be had.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        hosts: Hosts | None = None,
        shared_memory: bool = True,
        segment_bytes: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.hosts = hosts or find_hosts(group, device)
        reason = self.hosts.flat_reason()
        if reason is not None:
            raise TrimtabError(f"no hierarchy: {reason}; reduce flat over all ranks")
        rank = dist.get_rank(group)
        self.host, self.index = self.hosts.seat(rank)
        members = self.hosts.ranks[self.host]
        self.shared_memory = shared_memory
        self.inside: Inside
        if shared_memory:
            segments = [
                SharedMemory(group, device, members=members, nbytes=segment_bytes, timeout_s=timeout_s)
                for _ in range(2)
            ]
            self.inside = SharedInside(*segments)
        else:
            self.inside = GroupInside(*private_groups(group, device, 2, ranks=members))
        self.between: tuple[dist.ProcessGroup, ...] = ()
        if self.hosts.count > 1:
            self.between = private_groups(group, device, MAX_STAGES, ranks=self.hosts.peers(rank))

    def shard(self, pieces: Sequence[Piece], dtype: torch.dtype) -> Shard:
        """This rank's part of a bucket."""
        return shards(pieces, dtype, self.hosts.per_host)[self.index]

    def close(self) -> None:
        """Let go of shared memory and groups; the reductions must not be used after this."""
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
    starts = [piece.offset for piece in ordered]
    layout = plan_layout(ordered, dtype, count)
    cuts = [max((piece.offset + piece.numel for piece in ordered), default=0)]
    for chunk in reversed(layout.chunks):
        cuts.insert(0, chunk.segments[0].offset if chunk.segments else cuts[0])
    cuts[0] = 0
    parts = [
        tuple(
            replace(
                ordered[bisect_right(starts, segment.offset) - 1],
                offset=segment.offset,
                numel=segment.numel,
                first_block=segment.first_block,
            )
            for segment in chunk.segments
        )
        for chunk in layout.chunks
    ]
    return [Shard(cuts=tuple(cuts), pieces=part) for part in parts]


class HierarchicalReduction:
    """Reduces one bucket in two levels.

    `between` reduces this rank's shard with its peers; None where there is nothing to do: on one host, or for
    an empty shard, which is empty for all peers.
    """

    def __init__(
        self,
        inside: Inside,
        shard: Shard,
        between: Reduction | None,
        *,
        pieces: Sequence[Piece],
        memory: ErrorFeedback | None = None,
        owed: ShardFeedback | None = None,
    ) -> None:
        self._inside, self._shard, self._between = inside, shard, between
        self._pieces = [piece for piece in pieces if piece.bits != RAW]
        self._memory, self._owed = memory, owed

    def steps(self, flat: torch.Tensor, *, step: int, scale: float) -> Iterator[dist.Work]:
        """1. inside the host: reduce-scatter, exact.
        2. between hosts: the compressed reduction of my shard, with my peers.
        3. inside the host: all-gather.
        """
        if self._memory is not None:
            if scale != 1.0:
                flat.mul_(scale)
                scale = 1.0
            for piece in self._pieces:
                self._memory.restore(piece.name, flat[piece.offset : piece.offset + piece.numel])
        yield from self._inside.reduce_scatter(flat, self._shard.cuts, scale)
        begun = 0
        if self._between is not None:
            for work in self._between.steps(flat, step=step, scale=1.0):
                begun += 1
                yield work
        # The gather below must run in the same thread for every bucket, or ranks would start theirs in
        # different orders.
        for _ in range(begun, MAX_STAGES):
            yield together(flat)
        if self._memory is not None:
            self._keep(self._memory, flat)
        yield from self._inside.all_gather(flat, self._shard.cuts)

    def _keep(self, memory: ErrorFeedback, flat: torch.Tensor) -> None:
        """What this rank's encodings left out is owed; what others encoded was handed to them exactly."""
        parts = {} if self._owed is None else self._owed.parts
        starts = {part.name: part.offset for part in self._shard.pieces}
        for piece in self._pieces:
            owed = torch.zeros(piece.numel, dtype=torch.float32, device=flat.device)
            nothing = torch.zeros_like(owed)
            if piece.name in parts:
                part = parts[piece.name]
                first = starts[piece.name] - piece.offset
                owed[first : first + part.numel()] = part
            memory.keep(piece.name, owed, nothing)


class ShardFeedback(ErrorFeedback):
    """Collects what the reduction of a shard left out; the hierarchy gives it back in the next step.

    It is given back before the reduce-scatter, by whoever holds it: so nothing is lost when DDP's rebuilt buckets
    cut a parameter elsewhere and another rank owns the values from then on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, torch.Tensor] = {}

    def restore(self, name: str, values: torch.Tensor) -> None:
        """Nothing: it was added before the values were reduced inside the host."""

    def keep(self, name: str, meant: torch.Tensor, sent: torch.Tensor) -> None:
        self.parts[name] = meant.float() - sent.float()


class PlainShard:
    """The backend's own all-reduce of a run of the bucket."""

    def __init__(self, groups: tuple[dist.ProcessGroup, ...], start: int, end: int) -> None:
        self._plain, self._part = PlainReduction(groups), slice(start, end)

    def steps(self, flat: torch.Tensor, *, step: int, scale: float) -> Iterator[dist.Work]:
        """1. all-reduce."""
        return self._plain.steps(flat[self._part], step=step, scale=scale)
