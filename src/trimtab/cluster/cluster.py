"""The hardware of a job: hosts, device classes and link classes.

Hosts count how many devices of each *class* they hold, so that a thousand identical
ranks cost no more to describe than one. The same form describes clusters that were
measured, that are emulated, and that exist only on paper.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import inf
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator
from pydantic.dataclasses import dataclass

from trimtab.cluster.profile import Profile
from trimtab.errors import TrimtabError
from trimtab.strict_files import STRICT

SCHEMA_VERSION = 1

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Device:
    """A class of identical devices."""

    kind: Literal["cpu", "cuda"]
    """The torch device type."""

    speed: Annotated[float, Field(gt=0, le=1000)]
    """Rate of a long matrix product, relative to the other classes of this cluster."""

    memory_gib: Positive | None = None
    """Memory that one such device may use; no limit when absent."""

    model: str | None = None
    """The maker's name for it; also looked up in the catalog."""

    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    """Cost of one such device for an hour, in any one currency."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Link:
    """A class of identical links: what one host can send and receive."""

    gbit_per_s: Positive
    """Bandwidth in each direction, in 10⁹ bits per second."""

    latency_us: Annotated[float, Field(ge=0)] | None = None
    """One-way latency in microseconds; that of the medium when absent."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Host:
    """One or more identical machines."""

    name: Name
    """Unique in the cluster; with a count above one, the machines are called name-0, name-1 and so on."""

    devices: Annotated[dict[Name, Count], Field(min_length=1)]
    """How many devices of which class one such machine holds."""

    link: Name | None = None
    """Class of the link to other hosts; as fast as the medium allows when absent."""

    count: Count = 1
    """How many such machines there are."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One device of one machine, as a training job sees it."""

    rank: int
    host: str
    local_rank: int
    device: str
    """Name of the device class."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Cluster:
    """Hosts, and the classes of devices and links they are made of."""

    version: int
    """Version of the file format."""

    devices: Annotated[dict[Name, Device], Field(min_length=1)]
    hosts: Annotated[tuple[Host, ...], Field(min_length=1, strict=False)]
    links: dict[Name, Link] = Field(default_factory=dict)
    profile: Profile | None = None
    """Measurements, if there are any."""

    @model_validator(mode="after")
    def _refer_only_to_what_exists(self) -> Cluster:
        seen: set[str] = set()
        for index, host in enumerate(self.hosts):
            here = f"hosts[{index}] ({host.name})"
            for machine in {host.name, *_machine_names(host)}:
                if machine in seen:
                    raise ValueError(
                        f"{here}: there is already a host called {machine!r}; give each its own name"
                    )
                seen.add(machine)
            for device in host.devices:
                if device not in self.devices:
                    raise ValueError(f"{here}: no device class {device!r}; there are {_listed(self.devices)}")
            if host.link is not None and host.link not in self.links:
                raise ValueError(f"{here}: no link class {host.link!r}; there are {_listed(self.links)}")
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks: one for each device of each machine."""
        return sum(host.count * sum(host.devices.values()) for host in self.hosts)

    def machines(self) -> Iterator[tuple[str, Host]]:
        """Each single machine with its name, in rank order."""
        for host in self.hosts:
            for name in _machine_names(host):
                yield name, host

    def ranks(self) -> Iterator[Rank]:
        """Every rank in order: machines as listed, and inside each its devices as listed."""
        rank = 0
        for name, host in self.machines():
            local = 0
            for device, count in host.devices.items():
                for _ in range(count):
                    yield Rank(rank=rank, host=name, local_rank=local, device=device)
                    rank, local = rank + 1, local + 1


def parse_rate(text: str | None) -> float:
    """Gbit/s from ``1gbit``, ``100mbit``, ``2.5 Gbit/s``."""
    matched = re.fullmatch(r"(\d*\.?\d+) *([mg])bit(?:/s|ps)?", (text or "").strip(), re.IGNORECASE)
    rate = 0.0 if matched is None else float(matched[1]) * {"m": 1e-3, "g": 1.0}[matched[2].lower()]
    if not 0 < rate < inf:
        raise TrimtabError(f"{text!r} is not a link rate; write it as 1gbit or 100mbit")
    return rate


def model_name(cluster: Cluster, name: str | None) -> str:
    """The name of a model, by default that of the only one that was probed.

    Raises:
        TrimtabError: without a name, several models or none were probed.
    """
    if name is not None:
        return name
    names = [] if cluster.profile is None else list(cluster.profile.models)
    if len(names) != 1:
        probed = f"models {', '.join(names)} were" if names else "no model was"
        raise TrimtabError(f"{probed} probed: say which one is meant with --model")
    return names[0]


def _machine_names(host: Host) -> list[str]:
    return [host.name] if host.count == 1 else [f"{host.name}-{i}" for i in range(host.count)]


def _listed(names: dict[str, Device] | dict[str, Link]) -> str:
    return ", ".join(names) or "none"
