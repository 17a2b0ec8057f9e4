"""How ranks reduce compressed buckets: flat or in two levels, and by which method. `predict/` tells what each costs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab.cluster import Cluster
from trimtab.cluster.profile import LOCAL, CodecTime, Profile
from trimtab.errors import TrimtabError
from trimtab.predict.collectives import BLOCK, METHODS, Inside, Placement, Route, Stages, stages
from trimtab.predict.links import JobLinks
from trimtab.predict.replay.build import payloads
from trimtab.predict.step import codec_time, job_links, rank_counts
from trimtab.predict.step_setting import StepSetting
from trimtab.workload import Workload

EXTRA_ROUNDING_RATIO = 0.85
"""A route that rounds values more often must take at most this fraction of the time."""

EXTRA_LEVEL_RATIO = 0.85
"""Two levels must take at most this fraction of the time of a flat route, unless that one rounds more often than the
default (`FEW_ROUNDINGS`): a host's ranks wait for one another twice in every bucket."""

FEW_ROUNDINGS = 2
"""Those of the default, a scatter-reduce."""

MOST_ROUNDINGS = 16
"""Routes that round a value more often are not considered: a ring of many ranks drowns it in noise."""

SLOW_LINK = 1.5
"""Ranks may be spared where a byte takes this many times as long as on the fastest link."""

LEVELS = ("flat", "two_level")

MANY_RANKS = 16
"""From this world size a flat route is chosen by its costs; with fewer ranks the defaults are about as fast."""


@dataclass(frozen=True, kw_only=True)
class RouteChoice:
    """The chosen route, and the reason in words."""

    route: Route
    seconds: float
    """Predicted time of one bucket."""

    reason: str
    others: dict[str, float] = field(default_factory=dict)
    """Predicted seconds of every route that was considered, by name."""


@dataclass(frozen=True, kw_only=True)
class _Priced:
    route: Route
    stages: Stages
    seconds: float


def has_choice(placement: Placement) -> bool:
    """Whether `trimtab.compress` compares routes on these hosts; otherwise it reduces flat by the defaults."""
    return placement.hosts > 1 and (placement.two_levels or placement.world >= MANY_RANKS)


def choose_route(
    placement: Placement,
    numel: int,
    payload: int,
    links: JobLinks,
    codecs: Sequence[CodecTime],
    *,
    inside: Inside = "shared_memory",
) -> RouteChoice:
    """The fastest route for a bucket of `numel` values that is encoded in `payload` bytes.

    Among routes about as fast (`EXTRA_ROUNDING_RATIO`) the one that rounds least often wins; two levels must gain by
    themselves (`EXTRA_LEVEL_RATIO`).

    Args:
        codecs: of the ranks' device classes; the slowest counts.
        inside: how ranks of one host would reduce first.
    """
    if numel < 0 or payload < 0:
        raise ValueError(f"sizes cannot be negative; got {numel} and {payload}")
    levels: tuple[Inside | None, ...] = (None, inside) if placement.two_levels else (None,)
    priced: list[_Priced] = []
    for route in (Route(method=method, inside=level) for level in levels for method in METHODS):
        way = stages(route, placement, numel, payload)
        if way.roundings <= MOST_ROUNDINGS or not priced:
            seconds = sum(traffic.seconds(links.fits(traffic.collective)) for traffic in way.traffic)
            seconds += max(sum(way.local_s(codec, links.inside)) for codec in codecs)
            priced.append(_Priced(route=route, stages=way, seconds=seconds))
    flats = [one for one in priced if one.route.inside is None]
    flat = _pick(flats)
    best = _pick([one for one in priced if one.route.inside is None or _pays(one, flats)])
    return RouteChoice(
        route=best.route,
        seconds=best.seconds,
        reason=_reason(best, flat, placement, numel),
        others={one.route.name: one.seconds for one in priced},
    )


def named_route(name: str) -> Route:
    """The route that a user asks for by name: `flat` or `two-level`, a method, or both ("two-level ring").

    Raises:
        TrimtabError: there is no such route.
    """
    words = name.replace("-", "_").split()
    inside = words.pop(0) if words and words[0] in LEVELS else None
    method: Any = words.pop(0) if words and words[0] in METHODS else None
    if words or not (inside or method):
        methods = ", ".join(one.replace("_", "-") for one in METHODS)
        raise TrimtabError(
            f"route={name!r}: there is no such route; give flat or two-level, one of the methods {methods}, or both, "
            "as in 'two-level ring'"
        )
    return Route(method=method, inside="shared_memory" if inside == "two_level" else None)


def routes_to_try(
    cluster: Cluster, profile: Profile, workload: Workload, setting: StepSetting
) -> tuple[Route | None, ...]:
    """The routes among which a plan chooses: the one for the largest bucket, and the defaults, flat and in two levels.

    None alone where `trimtab.compress` has no choice either.
    """
    placement = Placement.on(cluster)
    if not has_choice(placement) or not workload.buckets:
        return (None,)
    assert setting.bits is not None
    routes = [job_route(cluster, profile, workload, setting.bits, setting.block), Route()]
    if placement.two_levels:
        routes.append(Route(inside="shared_memory"))
    return tuple(dict.fromkeys(routes))


def sparing_route(cluster: Cluster, profile: Profile) -> Route | None:
    """The flat route whose owners are the ranks behind faster links; None where all links are about as fast.

    A rank that owns a chunk receives it from all others and sends the sums to them. One that owns nothing has only its
    own gradients to send and the sums to receive.
    """
    if len({host.link for host in cluster.hosts}) < 2 or cluster.world_size < 3:
        return None
    fits = job_links(cluster, profile).fits("all_to_all")
    rates = {one.link: fit.per_byte_s for one, fit in zip(Placement.on(cluster).classes, fits, strict=True)}
    slowest_first = sorted(rates, key=lambda link: -rates[link])
    ways: list[tuple[float, Route]] = []
    for count in range(1, len(slowest_first)):
        if rates[slowest_first[count - 1]] < SLOW_LINK * rates[slowest_first[-1]]:
            break
        route = Route(spared=_ranks_on(cluster, slowest_first[:count]))
        scattered = replace(route, method="scatter_reduce")
        way = stages(scattered, Placement.on(cluster, route), BLOCK * cluster.world_size, 1 << 20)
        fits = job_links(cluster, profile, route).fits("all_to_all")
        ways.append((max(traffic.flow_s(fits) for traffic in way.traffic), route))
    return min(ways, key=lambda way: way[0])[1] if ways else None


def _ranks_on(cluster: Cluster, links: Collection[str]) -> tuple[int, ...]:
    """The ranks of the hosts with these links."""
    ranks: list[int] = []
    first = 0
    for host in cluster.hosts:
        count = sum(host.devices.values()) * host.count
        if (host.link or LOCAL) in links:
            ranks += range(first, first + count)
        first += count
    return tuple(ranks)


def job_route(
    cluster: Cluster, profile: Profile, workload: Workload, bits: int, block: int = BLOCK
) -> Route | None:
    """The route that `trimtab.compress` would choose for a job's largest bucket; None for the defaults."""
    placement = Placement.on(cluster)
    if not has_choice(placement) or not workload.buckets:
        return None
    sizes = {p.name: p.tensor.numel for p in workload.parameters}
    numels = [sum(sizes[name] for name in bucket.parameters) for bucket in workload.buckets]
    numel, payload = max(zip(numels, payloads(workload, StepSetting(bits=bits, block=block)), strict=True))
    codecs = [codec_time(profile, name, bits, block) for name in rank_counts(cluster)]
    return choose_route(placement, numel, payload, job_links(cluster, profile), codecs).route


def _pays(one: _Priced, flats: Sequence[_Priced]) -> bool:
    """Whether two levels are faster than every flat route, and by far than those that round as seldom."""
    few = max(one.stages.roundings, FEW_ROUNDINGS)
    ratios = ((EXTRA_LEVEL_RATIO if flat.stages.roundings <= few else 1.0, flat.seconds) for flat in flats)
    return all(one.seconds <= ratio * seconds for ratio, seconds in ratios)


def _pick(priced: Sequence[_Priced]) -> _Priced:
    fastest = min(one.seconds for one in priced)
    close = [one for one in priced if one.seconds * EXTRA_ROUNDING_RATIO <= fastest]
    return min(close, key=lambda one: (one.stages.roundings, one.route.inside is not None, one.seconds))


def _reason(best: _Priced, flat: _Priced, placement: Placement, numel: int) -> str:
    shape = f"{placement.hosts} hosts of {placement.most} ranks"
    sizes = {one.ranks for one in placement.classes}
    if len(sizes) > 1:
        shape = f"{placement.hosts} hosts of {min(sizes)} to {max(sizes)} ranks"
    words = f"{shape}, {4 * numel / 1e6:.3g} MB: {best.route.name} takes about {best.seconds * 1e3:.3g} ms"
    if best.route.inside:
        return f"{words}, the best flat route ({flat.route.name}) {flat.seconds * 1e3:.3g} ms"
    return words
