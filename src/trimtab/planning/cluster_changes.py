"""The cluster with more or fewer devices, other links, other prices. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from itertools import count as count_from

from trimtab.cluster import Cluster, Device, Host, Link, parse_rate
from trimtab.cluster.catalog import CATALOG, KnownDevice, lookup_typed
from trimtab.cluster.profile import LOCAL
from trimtab.errors import TrimtabError

MOST_ADDED = 1_000_000
"""As in a cluster file."""

FACTORS = (1e-9, 1e9)
"""The slowest and the fastest that a link can become."""


def changed(
    cluster: Cluster,
    *,
    remove: Sequence[str] | None = None,
    add: Sequence[str] | None = None,
    link_factor: float | None = None,
    link: str | None = None,
) -> Cluster:
    """The cluster with all of these changes."""
    if link is not None:
        cluster = with_link(cluster, link)
    for what in remove or ():
        cluster = without(cluster, what)
    for what in add or ():
        cluster = added(cluster, what)
    return cluster if link_factor is None else faster_links(cluster, link_factor)


def without(cluster: Cluster, what: str) -> Cluster:
    """The cluster without one rank: of the host of that name, or of the first host with that device class."""
    for index, host in enumerate(cluster.hosts):
        fits = [d for d in host.devices if d == what or fnmatchcase(host.name, what)]
        if not fits:
            continue
        others = [*cluster.hosts[:index], *cluster.hosts[index + 1 :]]
        left = dict(host.devices)
        left[fits[-1]] -= 1
        left = {device: count for device, count in left.items() if count}
        name = _free_name(cluster, f"{host.name}-x") if host.count > 1 else host.name
        kept = [replace(host, devices=left, count=1, name=name)] if left else []
        if host.count > 1:
            kept.append(replace(host, count=host.count - 1))
        if not (others or kept):
            raise TrimtabError(f"without {what!r} the cluster is empty")
        return replace(cluster, hosts=(*others[:index], *kept, *others[index:]))
    names = ", ".join([*(h.name for h in cluster.hosts), *cluster.devices])
    raise TrimtabError(f"there is no host or device class {what!r}; there are {names}")


def added(cluster: Cluster, what: str) -> Cluster:
    """The cluster with more devices: ``2xT4`` is a new host with two, on the link that the others have."""
    count, name = _counted(what)
    devices = dict(cluster.devices)
    if name not in devices:
        known = _known(cluster, name)
        name = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:25]
        devices[name] = Device(kind=known.kind, speed=1.0, memory_gib=known.memory_gib, model=known.model)
    link = next((host.link for host in cluster.hosts if host.link is not None), None)
    host = Host(name=_free_name(cluster, f"added-{name}"), devices={name: count}, link=link)
    return replace(cluster, devices=devices, hosts=(*cluster.hosts, host))


def _free_name(cluster: Cluster, wanted: str) -> str:
    """The name, or one like it, that no host of the cluster has."""
    taken = {host.name for host in cluster.hosts} | {name for name, _ in cluster.machines()}
    numbered = (f"{wanted[:24]}-x{number}" for number in count_from(2))
    return next(name for name in chain([wanted[:32]], numbered) if name not in taken)


def require_one_kind(cluster: Cluster) -> None:
    """Raise for ranks on CPUs and GPUs in one job: they compute other operators, and no backend serves both."""
    by_kind: dict[str, list[str]] = {}
    for host in cluster.hosts:
        for name in host.devices:
            names = by_kind.setdefault(cluster.devices[name].kind, [])
            names += [name] * (name not in names)
    if len(by_kind) > 1:
        both = " and ".join(f"{kind} ({', '.join(names)})" for kind, names in sorted(by_kind.items()))
        raise TrimtabError(
            f"the cluster has ranks on {both}, and one job cannot use both; plan for one kind, without the "
            "others' hosts (--remove NAME)"
        )


def _counted(what: str) -> tuple[int, str]:
    matched = re.fullmatch(r"(?:(\d+) *x *)?([A-Za-z0-9][A-Za-z0-9_ -]*)", what.strip())
    if matched is None or not 1 <= int(matched[1] or 1) <= MOST_ADDED:
        raise TrimtabError(
            f"cannot add {what!r}; write 2xT4, or 1x and a device class of the cluster; up to a million"
        )
    return int(matched[1] or 1), matched[2].strip()


def _known(cluster: Cluster, name: str) -> KnownDevice:
    known = lookup_typed(name)
    if known is None:
        cards = ", ".join(device.model for device in CATALOG if device.kind == "cuda")
        raise TrimtabError(
            f"{name!r} is neither a device class of the cluster ({', '.join(cluster.devices)}) nor in the catalog "
            f"({cards}); write 2xT4, or probe one and merge its file"
        )
    return known


def with_link(cluster: Cluster, rate: str) -> Cluster:
    """The cluster with a link of this rate (``1gbit``, ``200mbit``) for every host that has none."""
    link = Link(gbit_per_s=parse_rate(rate))
    if all(host.link is not None for host in cluster.hosts):
        raise TrimtabError("every host of the cluster has a link already; change its rate with --link-factor")
    name = re.sub(r"[^a-z0-9]+", "-", rate.lower()).strip("-")[:32]
    hosts = tuple(replace(host, link=host.link or name) for host in cluster.hosts)
    return replace(cluster, hosts=hosts, links={**cluster.links, name: link})


def parsed_prices(texts: list[str]) -> dict[str, float]:
    """``T4=0.35`` by name."""
    prices: dict[str, float] = {}
    for text in texts:
        name, _, price = text.rpartition("=")
        try:
            prices[name.strip()] = float(price)
        except ValueError:
            prices[""] = -1.0
        if "" in prices or not 0 <= prices[name.strip()] < float("inf"):
            raise TrimtabError(f"--price {text!r}: write a device and what it costs an hour: T4=0.35")
    return prices


def priced(cluster: Cluster, prices: Mapping[str, float]) -> Cluster:
    """The cluster with the prices of some device classes, by class or by a name of the catalog."""
    devices = dict(cluster.devices)
    for name, price in prices.items():
        for title in _called(cluster, name):
            devices[title] = replace(devices[title], price_per_hour=price)
    return replace(cluster, devices=devices)


def require_priced(clusters: Sequence[Cluster], prices: Mapping[str, float]) -> None:
    """Raise for a price of a device that none of the clusters has: it is a typing error, and would change nothing."""
    for name in prices:
        if not any(_called(cluster, name) for cluster in clusters):
            there = dict.fromkeys(title for cluster in clusters for title in cluster.devices)
            raise TrimtabError(f"--price {name}: there is no such device; there are {', '.join(there)}")


def _called(cluster: Cluster, name: str) -> list[str]:
    """The device classes with this name, or of the device of the catalog that has it."""
    known = lookup_typed(name)
    return [
        title
        for title, device in cluster.devices.items()
        if title == name or (known is not None and lookup_typed(device.model or title) == known)
    ]


def faster_links(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with links this many times as fast; latencies stay the same, and what ranks of one host exchange."""
    least, most = FACTORS
    if not least <= factor <= most:
        raise TrimtabError(
            f"a link cannot be {factor:g} times as fast; give --link-factor {least:g} to {most:g}"
        )
    links = {
        n: Link(gbit_per_s=k.gbit_per_s * factor, latency_us=k.latency_us) for n, k in cluster.links.items()
    }
    profile = cluster.profile
    if profile is not None:
        scaled = {
            name: collectives
            if name == LOCAL and cluster.links
            else {c: replace(time, per_byte_s=time.per_byte_s / factor) for c, time in collectives.items()}
            for name, collectives in profile.links.items()
        }
        profile = replace(profile, links=scaled)
    return replace(cluster, links=links, profile=profile)
