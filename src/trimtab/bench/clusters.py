"""The clusters that the benches emulate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.cluster import Cluster, Device, Host, Link
from trimtab.errors import TrimtabError


def hosts(
    speeds: Sequence[float],
    device: str = "cpu",
    *,
    link: str | None = None,
    names: Sequence[str] = "abcd",
    per_host: int = 1,
) -> Cluster:
    """A host for each speed.

    Args:
        device: `cpu`, or `cuda` for parts of one GPU that each look like a host of its own.
        link: the rate of every host's link (`parse_rate`); None or "none" leaves links unshaped.
        per_host: ranks of a host.
    """
    kind: Any = device
    names = names[: len(speeds)]
    rate = parse_rate(link) if link not in (None, "none") else None
    # One device class for equal speeds, named after the first host that has it.
    classes = {speed: name for name, speed in reversed(list(zip(names, speeds, strict=True)))}
    return Cluster(
        version=1,
        devices={classes[speed]: Device(kind=kind, speed=speed) for speed in dict.fromkeys(speeds)},
        links={"link": Link(gbit_per_s=rate)} if rate else {},
        hosts=tuple(
            Host(name=name, devices={classes[speed]: per_host}, link="link" if rate else None)
            for name, speed in zip(names, speeds, strict=True)
        ),
    )


def two_hosts(link: str | None = None, per_host: int = 1) -> Cluster:
    """Two equal hosts."""
    return hosts((1.0, 1.0), link=link, per_host=per_host)


def slices(count: int) -> Cluster:
    """One GPU as `count` equal ones, each looking like a host of its own."""
    return hosts((1.0,) * count, "cuda", names=[f"gpu{index}" for index in range(count)])


def parse_rate(text: str | None) -> float:
    """Gbit/s from `1gbit`, `100mbit`, `2.5gbit`."""
    for unit, factor in (("gbit", 1.0), ("mbit", 1e-3)):
        if text is not None and text.lower().endswith(unit):
            try:
                rate = float(text[: -len(unit)]) * factor
            except ValueError:
                break
            if rate > 0:
                return rate
    raise TrimtabError(f"{text!r} is not a link rate; write it as 1gbit, 100mbit or none")
