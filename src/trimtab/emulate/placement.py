"""Where each rank of the cluster runs on this machine: cores, GPU, speed, and torchrun node."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One rank's place on this machine."""

    rank: int
    host: str
    device: str
    """Name of the device class."""

    kind: str
    speed: float
    """As a part of the speed of the fastest class of its kind."""

    memory_gib: float | None
    cores: tuple[int, ...]
    slot: int
    """Which of `sharing` turns on its core is this rank's, where ranks outnumber cores."""

    sharing: int
    """How many ranks take turns on its core."""

    @property
    def called(self) -> str:
        """What messages call this rank."""
        return f"rank {self.rank} (host {self.host})"


@dataclass(frozen=True, kw_only=True)
class Node:
    """What one torchrun agent starts: the ranks of a host, or one rank that has a GPU's share to itself."""

    host: str
    placements: tuple[Placement, ...]


def place_ranks(cluster: Cluster, cores: Sequence[int]) -> list[Placement]:
    """Give each rank its cores, in turn where there are more ranks than cores."""
    fastest = {
        kind: max(device.speed for device in cluster.devices.values() if device.kind == kind)
        for kind in {device.kind for device in cluster.devices.values()}
    }
    share = max(1, len(cores) // cluster.world_size)
    sharing = -(-cluster.world_size // len(cores))
    placements = []
    for rank in cluster.ranks():
        device = cluster.devices[rank.device]
        first = rank.rank * share % len(cores)
        placements.append(
            Placement(
                rank=rank.rank,
                host=rank.host,
                device=rank.device,
                kind=device.kind,
                speed=device.speed / fastest[device.kind],
                memory_gib=device.memory_gib,
                cores=tuple(cores[first : first + share]),
                slot=rank.rank // len(cores),
                sharing=sharing,
            )
        )
    return placements


def nodes(placements: Sequence[Placement]) -> list[Node]:
    """One node for each host; one for each rank where a host has CUDA devices.

    Ranks that share a GPU must look to NCCL like hosts of their own, and a script must find
    its device as `cuda:LOCAL_RANK`: so torchrun too is told that they are nodes.
    """
    found = []
    for host, group in groupby(placements, key=lambda placement: placement.host):
        members = tuple(group)
        if any(placement.kind == "cuda" for placement in members):
            found += [Node(host=host, placements=(placement,)) for placement in members]
        else:
            found.append(Node(host=host, placements=members))
    return found
