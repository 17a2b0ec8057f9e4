"""A default group of the backend "trimtab" on ranks of the pool, in the place of the one the pool made."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

import trimtab.backend
from trimtab.backend import GroupOptions
from trimtab.codec import Block
from trimtab.doors.backend import TrimtabGroup

LARGE = 100_000
CODEC = Block(bits=4)


def default_store() -> Any:
    """The store of the default group."""
    world: Any = dist.distributed_c10d._world
    return world.pg_map[dist.group.WORLD][1]


def trimtab_default(
    store: Any = None, *, backend: str = "trimtab", timeout: float = 60.0, **options: Any
) -> TrimtabGroup:
    """Replace the default group; every rank calls it. `options` are those of `GroupOptions`."""
    store = PrefixStore("trimtab", default_store()) if store is None else store
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    trimtab.backend.register()
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
        pg_options=GroupOptions(**options),
    )
    group = dist.group.WORLD
    assert isinstance(group, TrimtabGroup)
    return group


def values(seed: int = 0, numel: int = LARGE, rank: int | None = None) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + rank))


def exact(seed: int = 0, numel: int = LARGE, members: Any = None) -> torch.Tensor:
    members = range(dist.get_world_size()) if members is None else members
    return torch.stack([values(seed, numel, rank) for rank in members]).sum(0)


def error(got: torch.Tensor, meant: torch.Tensor) -> float:
    return float((got - meant).norm() / meant.norm())


def same_everywhere(tensor: torch.Tensor) -> bool:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.contiguous())
    return all(torch.equal(other, tensor) for other in everyone)
