"""Measure the links inside and between hosts with the exchanges of a reduction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.cluster.profile import CodecTime, CollectiveTime, Line
from trimtab.codec import Block
from trimtab.collectives import Hierarchy, find_hosts, finish
from trimtab.errors import TrimtabError
from trimtab.measure.kernels import codec_times
from trimtab.measure.timing import repeated_seconds
from trimtab.predict.collectives import Placement, all_gather
from trimtab.predict.links import SHARED_MEMORY, Fit, JobLinks, fit

REPEATS = 3
TRIAL_NUMEL = 1 << 20
"""Elements of the trial exchange inside a host."""

TRIAL_BYTES = 1 << 22
"""Bytes of all ranks together in the trial exchange between hosts."""


def measure_host_links(
    group: dist.ProcessGroup,
    device: torch.device,
    codec: Block,
    placement: Placement,
    hierarchy: Hierarchy | None = None,
) -> tuple[JobLinks, CodecTime]:
    """Time a reduction's own exchanges, small and large, while all ranks work as in a step. Collective.

    With a hierarchy between one rank of each host and its peers, without it between all ranks.
    """

    def seconds(run: Callable[[], object]) -> float:
        return repeated_seconds(run, device, group, repeats=REPEATS)

    def between(nbytes: int) -> float:
        ranks = group if hierarchy is None else next(iter(hierarchy.between), None)
        if ranks is None:  # a rank that owns no shard
            return seconds(lambda: None)
        own = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        everyone = torch.zeros(ranks.size() * nbytes, dtype=torch.uint8, device=device)
        return seconds(lambda: all_gather_single(everyone, own, ranks))

    memory = SHARED_MEMORY
    peers, together = placement, 1
    if hierarchy is not None:
        together = hierarchy.hosts.shards
        memory = inside_rate(hierarchy, group, device)
        peers = placement.leaders()
    points = []
    for nbytes in (64, max(TRIAL_BYTES // peers.world, 1 << 14)):
        traffic = all_gather(nbytes, peers)
        points.append((traffic.messages, together * max(traffic.nbytes), between(nbytes)))
    links = JobLinks.uniform(fit(points), memory, classes=len(placement.classes))
    return links, _slowest_codec(codec, device, group)


def inside_times(group: dist.ProcessGroup, device: torch.device) -> dict[str, CollectiveTime]:
    """The exchange inside hosts as a profile stores it; empty where two levels are impossible. Collective."""
    hosts = find_hosts(group, device)
    if len(hosts.ranks) == 1 or hosts.flat_reason() is not None:
        return {}
    try:
        hierarchy = Hierarchy(group, device, hosts=hosts)
    except TrimtabError:  # no shared memory; the same on every rank
        return {}
    rate = inside_rate(hierarchy, group, device)
    hierarchy.close()
    time = CollectiveTime(per_message_s=rate.per_message_s, per_byte_s=rate.per_byte_s)
    return {"all_to_all": time, "all_gather": time}


def inside_rate(hierarchy: Hierarchy, group: dist.ProcessGroup, device: torch.device) -> Fit:
    """The rate at which ranks of the largest host exchange values, while all hosts do. Collective."""
    exchange, most = hierarchy.inside, max(len(members) for members in hierarchy.hosts.ranks)

    def seconds(numel: int) -> float:
        flat = torch.zeros(numel, dtype=torch.float32, device=device)
        cuts = [numel * rank // exchange.world for rank in range(exchange.world + 1)]

        def run() -> None:
            finish(exchange.reduce_scatter(flat, cuts, 1.0))
            finish(exchange.all_gather(flat, cuts))

        # Two exchanges, each of which moves all but a rank's own part.
        return repeated_seconds(run, device, group, repeats=REPEATS) / 2

    moved = 4 * (most - 1) / most
    return fit([(1, n * moved, seconds(n)) for n in (64 * most, TRIAL_NUMEL)])


def _slowest_codec(codec: Block, device: torch.device, group: dist.ProcessGroup) -> CodecTime:
    """The codec's times on the slowest rank: the same on all of them."""
    lines = asdict(codec_times(codec.bits, device, block=codec.block, rounds=1, feedback=False))
    times = torch.tensor([list(line.values()) for line in lines.values()], dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return CodecTime(**{which: Line(a=a, c=c) for which, (a, c) in zip(lines, times.tolist(), strict=True)})
