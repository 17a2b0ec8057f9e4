"""Whether a job reduces in two levels, inside and between hosts: links are measured, then the route is chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from trimtab.codec import Block
from trimtab.collectives import Hierarchy, Method, find_hosts, plan_layout
from trimtab.errors import TrimtabError
from trimtab.measure.host_links import measure_host_links, piece_of
from trimtab.planning.compression.route import choose_route


@dataclass(frozen=True, kw_only=True)
class HostRoute:
    """The arguments of `reduction_for`, and why."""

    hierarchy: Hierarchy | None
    method: Method | None
    reason: str


def choose_host_route(
    group: dist.ProcessGroup, device: torch.device, codec: Block, bucket_bytes: int
) -> HostRoute:
    """Find the hosts, measure inside and between them, and choose for buckets of this size.

    Collective: every rank of the group calls it at the same point, and all get the same result. Takes about a
    tenth of a second at 1 Gbit/s. If every host has one rank, nothing is measured.
    """
    hosts = find_hosts(group, device)
    reason = hosts.flat_reason()
    if reason is not None:
        return HostRoute(hierarchy=None, method=None, reason=reason)
    fallback = ""
    try:
        hierarchy = Hierarchy(group, device, hosts=hosts)
    except TrimtabError as error:  # the same on every rank
        fallback = f"; inside the hosts without shared memory: {error}"
        hierarchy = Hierarchy(group, device, hosts=hosts, shared_memory=False)
    links = measure_host_links(hierarchy, group, device, codec)
    payload = plan_layout([piece_of(codec, bucket_bytes // 4)], torch.float32, 1).chunks[0].nbytes
    route = choose_route([hosts.per_host] * hosts.count, bucket_bytes, payload, links)
    if not route.hierarchical:
        hierarchy.close()
    return HostRoute(
        hierarchy=hierarchy if route.hierarchical else None,
        method=route.method,
        reason=route.reason + fallback,
    )
