"""Measure the links inside and between hosts with the exchanges of a hierarchical reduction."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.codec import Block
from trimtab.codec.kernels import kernels_for
from trimtab.collectives import Hierarchy, Piece, finish, plan_layout
from trimtab.measure.timing import repeated_seconds
from trimtab.predict.host_links import HostLinks, LinkSpeed

REPEATS = 3
TRIAL_NUMEL = 1 << 20
"""Elements of the trial exchanges."""


def measure_host_links(
    hierarchy: Hierarchy, group: dist.ProcessGroup, device: torch.device, codec: Block
) -> HostLinks:
    """Time the hierarchy's own exchanges, small and large, while all ranks work as in a step. Collective."""
    local, hosts = hierarchy.hosts.per_host, hierarchy.hosts.count

    def seconds(run: Callable[[], None]) -> float:
        return repeated_seconds(run, device, group, repeats=REPEATS)

    def inside(numel: int) -> Callable[[], None]:
        flat = torch.zeros(numel, device=device)
        cuts = [numel * rank // local for rank in range(local + 1)]

        def run() -> None:
            finish(hierarchy.inside.reduce_scatter(flat, cuts, 1.0))
            finish(hierarchy.inside.all_gather(flat, cuts))

        return run

    def between(nbytes: int) -> Callable[[], None]:
        own = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        everyone = torch.zeros(hosts * nbytes, dtype=torch.uint8, device=device)

        def run() -> None:
            all_gather_single(everyone, own, hierarchy.between[0])

        return run

    small, large = 64 * local, TRIAL_NUMEL
    # Two exchanges, each of which moves all but a rank's own part.
    memory = _speed(seconds(inside(small)) / 2, seconds(inside(large)) / 2, large * 4 * (local - 1) / local)
    network = memory
    if hosts > 1:
        network = _speed(seconds(between(64)), seconds(between(large)), large * local * (hosts - 1))
    packing = plan_layout([piece_of(codec, large)], torch.float32, 1).chunks[0]
    values = torch.zeros(large, device=device)
    payload = torch.zeros(packing.nbytes, dtype=torch.uint8, device=device)
    kernels = kernels_for(device)
    encoding = seconds(lambda: kernels.encode(values, packing, payload, stream=0))
    return HostLinks(between=network, inside=memory, codec_bytes_per_s=large * 4 / encoding)


def piece_of(codec: Block, numel: int) -> Piece:
    """A bucket of one parameter, encoded by this codec."""
    return Piece(name="", offset=0, numel=numel, bits=codec.bits, block=codec.block)


def _speed(small_s: float, large_s: float, nbytes: float) -> LinkSpeed:
    return LinkSpeed(latency_s=small_s, bytes_per_s=nbytes / max(large_s - small_s, 1e-9))
