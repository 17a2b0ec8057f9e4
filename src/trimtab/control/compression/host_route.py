"""How a job reduces its gradients, flat or in two levels: links are measured, then the route is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trimtab.codec import Block
from trimtab.collectives import Hierarchy, Method, find_hosts
from trimtab.control.rank_values import gather_choices
from trimtab.environment import logger
from trimtab.errors import TrimtabError
from trimtab.wire_format import encoded_bytes

if TYPE_CHECKING:
    from trimtab.collectives.topology import Hosts
    from trimtab.predict.collectives import Route


@dataclass(frozen=True, kw_only=True)
class HostRoute:
    """The arguments of `reduction_for`, and why."""

    hierarchy: Hierarchy | None
    method: Method | None
    reason: str
    spared: tuple[int, ...] = ()


def choose_host_route(
    group: dist.ProcessGroup,
    device: torch.device,
    codec: Block,
    bucket_bytes: int,
    tensor_group: dist.ProcessGroup | None = None,
) -> HostRoute:
    """Find the hosts, measure inside and between them, and choose for buckets of this size.

    Collective: every rank of the group calls it at the same point, and all get the same result. Takes about a
    tenth of a second at 1 Gbit/s. Nothing is measured on a single host, and where few hosts have one rank each.

    Args:
        tensor_group: the ranks that must choose alike although their groups differ.
    """
    # Here, because they bring pydantic: importing `trimtab.compress` is to cost little more than importing torch.
    from trimtab.measure.host_links import measure_host_links
    from trimtab.planning.compression.route import choose_route, has_choice
    from trimtab.predict.collectives import Placement

    hosts = find_hosts(group, device)
    placement = Placement.of(len(ranks) for ranks in hosts.ranks)
    reason = hosts.flat_reason() or ""
    if any(other != placement for other in gather_choices(placement, tensor_group)):
        return HostRoute(hierarchy=None, method=None, reason="tensor-parallel ranks have different hosts")
    if not has_choice(placement):
        return HostRoute(hierarchy=None, method=None, reason=reason or "all ranks are on one host")
    hierarchy = None
    if placement.two_levels:
        hierarchy, reason = _hierarchy(group, device, hosts)
    links, codec_time = measure_host_links(group, device, codec, placement, hierarchy)
    numel = bucket_bytes // 4
    choice = choose_route(
        placement,
        numel,
        encoded_bytes(numel, codec.bits, codec.block),
        links,
        [codec_time],
        inside="group" if hierarchy is not None and not hierarchy.shared_memory else "shared_memory",
    )
    choice = gather_choices(choice, tensor_group)[0]
    if dist.get_rank(group) == 0:
        logger().debug(
            f"route for buckets of {bucket_bytes / 1e6:.1f} MB: {choice.reason}; measured {links}, {codec_time}"
        )
    if hierarchy is not None and choice.route.inside is None:
        hierarchy.close()
        hierarchy = None
    return HostRoute(
        hierarchy=hierarchy,
        method=choice.route.method,
        reason=f"{choice.reason}; {reason}" if reason else choice.reason,
    )


def fixed_host_route(
    group: dist.ProcessGroup, device: torch.device, route: Route, words: str = "as planned"
) -> HostRoute:
    """The route of a plan, or one that was requested, without measuring anything. Collective.

    Where the hosts do not allow two levels, it falls back to the flat default. `words` say where it comes from.
    """
    if route.inside is None:
        return HostRoute(
            hierarchy=None, method=route.method, reason=f"{route.name}, {words}", spared=route.spared
        )
    hosts = find_hosts(group, device)
    flat = "all ranks are on one host" if len(hosts.ranks) == 1 else hosts.flat_reason()
    if flat is not None:
        return HostRoute(hierarchy=None, method=None, reason=f"not {route.name} {words}: {flat}")
    hierarchy, reason = _hierarchy(group, device, hosts, shared_memory=route.inside == "shared_memory")
    words = f"{route.name}, {words}"
    return HostRoute(
        hierarchy=hierarchy, method=route.method, reason=f"{words}; {reason}" if reason else words
    )


def _hierarchy(
    group: dist.ProcessGroup, device: torch.device, hosts: Hosts, *, shared_memory: bool = True
) -> tuple[Hierarchy, str]:
    """The two levels of a group; without shared memory where there is none, and why."""
    if shared_memory:
        try:
            return Hierarchy(group, device, hosts=hosts), ""
        except TrimtabError as error:  # the same on every rank
            reason = f"inside the hosts without shared memory: {error}"
            return Hierarchy(group, device, hosts=hosts, shared_memory=False), reason
    return Hierarchy(group, device, hosts=hosts, shared_memory=False), ""
