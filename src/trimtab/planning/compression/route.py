"""How the ranks should reduce a bucket: flat or in two levels, and by which algorithm. Pure arithmetic.

A model of each route's time, from the hosts, the bucket's size and measured speeds of links and codec. It only
ranks the routes and does not predict a step, so what all have in common is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.predict.host_links import HostLinks

Method = Literal["all_gather", "scatter_reduce", "ring", "tree"]

EXTRA_ROUNDING_RATIO = 0.85
"""A route that rounds values more often, or adds a level, must take at most this fraction of the time."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """The chosen route, and the reason in words."""

    hierarchical: bool
    method: Method
    """Among all ranks, or with `hierarchical` among the hosts."""

    seconds: float
    """Modeled time of one bucket."""

    reason: str
    others: dict[str, float] = field(default_factory=dict)
    """Modeled seconds of every route that was considered, by name."""


@dataclass(frozen=True, kw_only=True)
class _Route:
    hierarchical: bool
    method: Method
    seconds: float
    roundings: int
    """How often a value is rounded before it is in the sum."""

    @property
    def name(self) -> str:
        return f"{'two levels, ' if self.hierarchical else 'flat '}{self.method.replace('_', '-')}"


def choose_route(ranks_per_host: Sequence[int], nbytes: int, payload_bytes: int, links: HostLinks) -> Route:
    """The fastest route for a bucket of `nbytes` that is encoded in `payload_bytes`.

    Hosts with unequal numbers of ranks have no second level. Among routes about as fast
    (`EXTRA_ROUNDING_RATIO`) the one that rounds least often wins, then the flat one.
    """
    if not ranks_per_host or min(ranks_per_host) < 1:
        raise ValueError(f"every host has at least one rank; got {list(ranks_per_host)}")
    if nbytes < 0 or payload_bytes < 0:
        raise ValueError(f"sizes cannot be negative; got {nbytes} and {payload_bytes}")
    world, local = sum(ranks_per_host), max(ranks_per_host)
    hosts = len(ranks_per_host)
    even = len(set(ranks_per_host)) == 1
    routes = [_flat(method, world, local, hosts, nbytes, payload_bytes, links) for method in _METHODS]
    if even and local > 1:
        routes += [_levels(method, hosts, local, nbytes, payload_bytes, links) for method in _METHODS]
    best = _pick(routes)
    flat = _pick([route for route in routes if not route.hierarchical])
    return Route(
        hierarchical=best.hierarchical,
        method=best.method,
        seconds=best.seconds,
        reason=_reason(best, flat, ranks_per_host, even, nbytes),
        others={route.name: route.seconds for route in routes},
    )


_METHODS: tuple[Method, ...] = ("all_gather", "scatter_reduce", "ring", "tree")


def _pick(routes: Sequence[_Route]) -> _Route:
    fastest = min(route.seconds for route in routes)
    close = [route for route in routes if route.seconds * EXTRA_ROUNDING_RATIO <= fastest]
    return min(close, key=lambda route: (route.roundings, route.hierarchical, route.seconds))


def _flat(
    method: Method, world: int, local: int, hosts: int, nbytes: float, payload: float, links: HostLinks
) -> _Route:
    """All ranks alike; the `local` ranks of a host share its interface."""
    messages, crossing, coded, roundings = _exchange(method, world, local, payload)
    path = links.between if hosts > 1 else links.inside
    seconds = path.seconds(messages, crossing) + coded * nbytes / links.codec_bytes_per_s
    return _Route(hierarchical=False, method=method, seconds=seconds, roundings=roundings)


def _levels(
    method: Method, hosts: int, local: int, nbytes: float, payload: float, links: HostLinks
) -> _Route:
    """Exact inside a host; each of its `local` ranks exchanges its shard over the shared interface."""
    inside = 2 * links.inside.seconds(1, nbytes * (local - 1) / local)
    if hosts == 1:
        return _Route(hierarchical=True, method=method, seconds=inside, roundings=0)
    messages, crossing, coded, roundings = _exchange(method, hosts, 1, payload)
    between = links.between.seconds(messages, crossing)
    seconds = inside + between + coded * nbytes / local / links.codec_bytes_per_s
    return _Route(hierarchical=True, method=method, seconds=seconds, roundings=roundings)


def _exchange(method: Method, world: int, local: int, payload: float) -> tuple[float, float, float, int]:
    """Sequential messages, bytes through the busiest interface, passes of the codec, and roundings.

    `local` ranks share an interface; when that is all of them, the link is memory, and each rank has its own.
    """
    away = world - local
    if away <= 0:
        away, local = world - 1, 1
    levels = math.ceil(math.log2(world)) if world > 1 else 0
    if method == "all_gather":
        return 1, local * away * payload, 1 + world, 1
    if method == "scatter_reduce":
        return 2, 2 * local * away * payload / world, 3, 2
    if method == "ring":
        # A single connection leaves each host, however many ranks it has.
        return 2 * (world - 1), 2 * (world - 1) * payload / world, 3, world
    # The root's interface receives a payload from each level, and sends as many.
    return 2 * levels, 2 * levels * payload, levels + 2, levels + 1


def _reason(best: _Route, flat: _Route, ranks_per_host: Sequence[int], even: bool, nbytes: int) -> str:
    shape = f"{len(ranks_per_host)} hosts of {ranks_per_host[0]} ranks"
    if not even:
        shape = f"hosts of {', '.join(map(str, ranks_per_host))} ranks (unequal: no second level)"
    words = f"{shape}, {nbytes / 1e6:.3g} MB: {best.name} takes about {best.seconds * 1e3:.3g} ms"
    if best.hierarchical:
        return f"{words}, the best flat route ({flat.name}) {flat.seconds * 1e3:.3g} ms"
    return words
