"""Jobs to plan for: the clusters of `tests.predict.profiles`, and damages that nobody measured."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.predict.profiles import FAST, SLOW, cluster, device_profile, profile, workload

from trimtab.cluster import Cluster, Device, Host, Link
from trimtab.planning.make_plan import make_plan

if TYPE_CHECKING:
    from trimtab.planning.plan import Plan

BETWEEN = 7_000_000 / 2**30
"""GiB between what a rank with 16 samples needs as it is, and with all in int8."""


def damages(size: float = 1e-3) -> dict[str, dict[str, float]]:
    """Very unlike ones: each operator's is some part of the one's before it."""
    found, now = {}, size
    for name in workload().settings:
        found[name] = {"int8": now}
        now = now * 0.6 if now > size / 50 else size * 0.9
    return found


def uneven(slower: float = 1.3, **memory: float) -> Cluster:
    """The slow device so many times slower; memory in GiB by class."""
    devices = {name: Device(kind="cpu", speed=1.0, memory_gib=memory.get(name)) for name in cluster().devices}
    return replace(cluster(), devices=devices, profile=profile(slower))


def three(**counts: int) -> Cluster:
    """Three classes, of speeds 1, 2 and 3."""
    given = profile()
    names = {"one": 1.0, "two": 2.0, "three": 3.0}
    return Cluster(
        version=1,
        devices={name: Device(kind="cpu", speed=1 / slower) for name, slower in names.items()},
        links=cluster().links,
        hosts=tuple(Host(name=f"h{name}", devices={name: counts.get(name, 1)}, link="lan") for name in names),
        profile=replace(given, devices={name: device_profile(slower) for name, slower in names.items()}),
    )


def behind_a_slow_link(slower: float) -> Cluster:
    """Three hosts, the last of them behind a link so many times slower."""
    given = three()
    assert given.profile is not None
    slow = {
        name: replace(time, per_byte_s=slower * time.per_byte_s)
        for name, time in given.profile.links["lan"].items()
    }
    return replace(
        given,
        links={**given.links, "slow": Link(gbit_per_s=1 / slower)},
        hosts=(*given.hosts[:2], replace(given.hosts[2], link="slow")),
        profile=replace(given.profile, links={**given.profile.links, "slow": slow}),
    )


def planned(given: Cluster, total: int = 8, *, size: float = 1e-3, **keywords: Any) -> Plan:
    return make_plan(given, workload(), damages(size), model="m", trimtab="0", batch_size=total, **keywords)


__all__ = ["BETWEEN", "FAST", "SLOW", "behind_a_slow_link", "damages", "planned", "three", "uneven"]
