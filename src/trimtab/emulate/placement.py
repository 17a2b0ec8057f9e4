"""Where each rank of a cluster runs on this machine: cores, speed, and torchrun node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the small processes of an emulation start without pydantic
    from trimtab.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one rank runs on this machine."""

    rank: int
    host: str
    device: str
    """Name of the device class."""

    kind: str
    speed: float
    """Relative to the fastest device class of its kind."""

    memory_gib: float | None
    cores: tuple[int, ...]
    slot: int
    """Index of this rank among those that share its core, if there are more ranks than cores."""

    sharing: int
    """Number of ranks that share its core."""


def place_ranks(cluster: Cluster, cores: Sequence[int]) -> list[Placement]:
    """Assign cores to each rank, cyclically if there are more ranks than cores."""
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


def nodes(placements: Sequence[Placement]) -> list[list[Placement]]:
    """The ranks that each torchrun agent starts: those of a host, or a single one where a host has CUDA devices.

    NCCL must see ranks that share a GPU as separate hosts, and a script must find its device as `cuda:LOCAL_RANK`, so
    they are separate nodes for torchrun too.
    """
    result: list[list[Placement]] = []
    for _, group in groupby(placements, key=lambda placement: placement.host):
        members = list(group)
        shares_gpu = any(placement.kind == "cuda" for placement in members)
        result += [[placement] for placement in members] if shares_gpu else [members]
    return result
