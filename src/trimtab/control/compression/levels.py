"""Whether a job reduces in two levels, and how: hosts found, links measured, the route chosen."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.codec.kernels import kernels_for
from trimtab.collectives import Hierarchy, Method, Piece, find_hosts, finish, plan_layout
from trimtab.errors import TrimtabError
from trimtab.planning.compression.route import Links, LinkSpeed, choose_route

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.codec import Block

REPEATS = 3
TRIAL_NUMEL = 1 << 20
"""Elements of the trial exchanges."""


@dataclass(frozen=True, kw_only=True)
class Levels:
    """What `reduction_for` is to be given, and why."""

    hierarchy: Hierarchy | None
    method: Method | None
    reason: str


def choose_levels(group: dist.ProcessGroup, device: torch.device, codec: Block, bucket_bytes: int) -> Levels:
    """Find the hosts, measure inside and between them, and choose for buckets of this size.

    Collective: every rank of the group calls it at the same point; all get the same answer. Takes about a
    tenth of a second at 1 Gbit/s. Where every host has one rank nothing is measured: `reduction_for` knows.
    """
    hosts = find_hosts(group, device)
    reason = hosts.flat_reason()
    if reason is not None:
        return Levels(hierarchy=None, method=None, reason=reason)
    without = ""
    try:
        hierarchy = Hierarchy(group, device, hosts=hosts)
    except TrimtabError as error:  # the same on every rank
        without = f"; inside the hosts without shared memory: {error}"
        hierarchy = Hierarchy(group, device, hosts=hosts, shared_memory=False)
    links = measure_links(hierarchy, group, device, codec)
    numel = bucket_bytes // 4
    payload = plan_layout([_piece(codec, numel)], torch.float32, 1).chunks[0].nbytes
    route = choose_route([hosts.per_host] * hosts.count, bucket_bytes, payload, links)
    if not route.hierarchical:
        hierarchy.close()
        return Levels(hierarchy=None, method=route.method, reason=route.reason + without)
    return Levels(hierarchy=hierarchy, method=route.method, reason=route.reason + without)


def measure_links(
    hierarchy: Hierarchy, group: dist.ProcessGroup, device: torch.device, codec: Block
) -> Links:
    """Time the hierarchy's own exchanges, small and large, with all ranks at work as in a step. Collective."""
    local, hosts = hierarchy.hosts.per_host, hierarchy.hosts.count

    def inside(numel: int) -> Callable[[], None]:
        flat = torch.zeros(numel, device=device)
        cuts = [numel * rank // local for rank in range(local + 1)]

        def run() -> None:
            finish(hierarchy.inside.reduce_scatter(flat, cuts, 1.0))
            finish(hierarchy.inside.all_gather(flat, cuts))

        return run

    def between(nbytes: int) -> Callable[[], None]:
        mine = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        everyone = torch.zeros(hosts * nbytes, dtype=torch.uint8, device=device)

        def run() -> None:
            all_gather_single(everyone, mine, hierarchy.between[0])

        return run

    small, large = 64 * local, TRIAL_NUMEL
    quick, slow = (_timed(inside(numel), group, device) for numel in (small, large))
    # Two exchanges, of which each moves all but a rank's own part.
    memory = _path(quick / 2, slow / 2, large * 4 * (local - 1) / local)
    network = memory
    if hosts > 1:
        quick, slow = (_timed(between(nbytes), group, device) for nbytes in (64, large))
        network = _path(quick, slow, large * local * (hosts - 1))
    packing = plan_layout([_piece(codec, large)], torch.float32, 1).chunks[0]
    values = torch.zeros(large, device=device)
    payload = torch.zeros(packing.nbytes, dtype=torch.uint8, device=device)
    kernels = kernels_for(device)
    encoding = _timed(lambda: kernels.encode(values, packing, payload, stream=0), group, device)
    return Links(between=network, inside=memory, codec_bytes_per_s=large * 4 / encoding)


def _path(quick: float, slow: float, nbytes: float) -> LinkSpeed:
    return LinkSpeed(latency_s=quick, bytes_per_s=nbytes / max(slow - quick, 1e-9))


def _piece(codec: Block, numel: int) -> Piece:
    return Piece(name="", offset=0, numel=numel, bits=codec.bits, block=codec.block)


def _timed(run: Callable[[], None], group: dist.ProcessGroup, device: torch.device) -> float:
    """Median seconds until the slowest rank has finished; the same on every rank."""
    samples = []
    for _ in range(REPEATS + 1):
        taken = torch.zeros(1, device=device, dtype=torch.float64)
        dist.all_reduce(taken, group=group)
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        taken += time.perf_counter() - start
        dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=group)
        samples.append(float(taken))
    return median(samples[1:])  # the first opens connections and fills caches


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
