"""The cluster of a run, from what its ranks wrote: in the form of a cluster file, as far as it is known."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from trimtab.cluster import SCHEMA_VERSION, Cluster, Device, Host, Link, parse_cluster
from trimtab.errors import TrimtabError
from trimtab.report.run_folder import Rank, Run, is_number

MEASURED = "measured"
"""The link class with the rate of a trial exchange."""


def known_cluster(run: Run) -> Cluster | None:
    """The cluster that run.json holds, or what the ranks say of hosts, devices and the link; None if they say nothing.

    A device's speed is that of the job: samples a second while the rank does not wait.
    """
    held = run.info.get("cluster")
    if isinstance(held, dict):
        try:
            return parse_cluster(json.dumps(held), source="run.json", form="json")
        except (TrimtabError, ValueError, RecursionError):
            return None
    try:
        return _described(run)
    except (ValueError, OverflowError):  # no rank of a real job writes such values
        return None


def _described(run: Run) -> Cluster | None:
    described = {rank.rank: rank.of("device")[-1] for rank in run.ranks.values() if rank.of("device")}
    if not described or any(not isinstance(rank.start.get("host"), str) for rank in run.ranks.values()):
        return None
    kinds = {rank: _class_of(event) for rank, event in described.items()}
    names = _unique(dict.fromkeys(kinds.values()), lambda kind: kind[1])
    by_kind: dict[Any, list[float]] = {}
    for number, kind in kinds.items():
        by_kind.setdefault(kind, []).extend(_rates(run, number))
    speeds = {kind: sum(rates) / len(rates) for kind, rates in by_kind.items() if rates}
    fastest = max(speeds.values(), default=1.0)
    devices = {}
    for kind, name in names.items():
        devices[name] = Device(
            kind="cuda" if kind[0] == "cuda" else "cpu",
            model=kind[1][:80],
            memory_gib=kind[2] / 2**30 if kind[2] else None,
            speed=max(1e-3, round(speeds.get(kind, fastest) / fastest, 3)),
        )
    by_host: dict[str, list[int]] = {}
    for number, rank in run.ranks.items():
        if number in described:
            by_host.setdefault(str(rank.start["host"]), []).append(number)
    rate = _rate(run.ranks.values()) if len(by_host) > 1 else None
    hosts = []
    for host, name in _unique(by_host, str).items():
        held_devices = [names[kinds[number]] for number in by_host[host]]
        counts = {device: held_devices.count(device) for device in dict.fromkeys(held_devices)}
        hosts.append(Host(name=name, devices=counts, link=MEASURED if rate else None))
    return Cluster(
        version=SCHEMA_VERSION,
        devices=devices,
        hosts=tuple(hosts),
        links={MEASURED: Link(gbit_per_s=rate)} if rate else {},
    )


def _class_of(event: dict[str, Any]) -> tuple[str, str, int]:
    """Kind, name and memory of a device: alike devices are one class."""
    limit: Any = event.get("memory_limit")
    kind = str(event.get("device") or "cpu").partition(":")[0]
    return kind, str(event.get("name") or kind), int(limit) if is_number(limit) and limit > 0 else 0


def _unique(values: Iterable[Any], text: Callable[[Any], str]) -> dict[Any, str]:
    """A name for each value, of the characters that a cluster file allows."""
    names: dict[Any, str] = {}
    for value in values:
        name = plain = re.sub(r"[^A-Za-z0-9_-]+", "-", text(value)).strip("-_")[:24] or "unnamed"
        while name in names.values():
            name = f"{plain}-{len(names) + 1}"
        names[value] = name
    return names


def _rates(run: Run, rank: int) -> list[float]:
    """Samples a second of a rank while it does not wait, in the last half of its samples."""
    samples = run.steps.get(rank, [])
    rates = []
    for sample in samples[len(samples) // 2 :]:
        own = sum(sample[part] or 0.0 for part in ("data", "compute", "optimizer"))
        if sample["samples"] and own > 0:
            rates.append(sample["samples"] / own)
    return rates


def _rate(ranks: Iterable[Rank]) -> float | None:
    """Gbit/s of the last trial exchange in full precision."""
    for rank in ranks:
        for decision in reversed(rank.of("decision")):
            expected = decision.get("expected")
            rate: Any = expected.get("gbit_per_s") if isinstance(expected, dict) else None
            if is_number(rate) and rate > 0:
                return float(f"{rate:.4g}")
    return None
