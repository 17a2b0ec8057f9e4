"""`trimtab.mesh`: the device mesh that a plan asks for."""

from __future__ import annotations

from os import PathLike

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trimtab.control.plans.active_plan import agree_on_plan, read_plan
from trimtab.errors import TrimtabError
from trimtab.planning.plan import Plan


def mesh(plan: Plan | str | PathLike[str]) -> DeviceMesh:
    """The device mesh of a plan, with the dimensions ``dp`` (copies of the model) and ``tp`` (ranks of one copy).

    Every rank calls it once, after `init_process_group`. With HSDP ``dp`` is divided into ``replicate`` and ``shard``.

    ::

        mesh = trimtab.mesh("plan.json")
        trimtab.tensor_parallel(model, mesh, shares="plan.json")   # if the plan has tensor groups
        ddp = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
        trimtab.apply(ddp, "plan.json")

    Under a plan for FSDP2 ``fully_shard(module, mesh=mesh["dp"])`` takes the place of DDP, under one for HSDP
    ``fully_shard(module, mesh=mesh["replicate", "shard"])``.

    Raises:
        TrimtabError: on every rank, if the plan is for another number of ranks or differs between ranks.
    """
    if not dist.is_initialized():
        raise TrimtabError("mesh: call torch.distributed.init_process_group first")

    def load() -> Plan:
        loaded = read_plan(plan)
        if loaded.world_size != dist.get_world_size():
            raise TrimtabError(
                f"mesh: the plan is for {loaded.world_size} ranks, and there are {dist.get_world_size()}; make the "
                "plan again with `trimtab plan`"
            )
        return loaded

    agreed = agree_on_plan(load, None)
    kind = agreed.roles[agreed.role_of(dist.get_rank())].kind or "cpu"
    groups = agreed.tensor_groups or tuple((rank,) for rank in range(agreed.world_size))
    if agreed.shard_ranks is not None:
        shards = torch.tensor(groups).view(-1, agreed.shard_ranks, agreed.tensor_size)
        return DeviceMesh(kind, shards, mesh_dim_names=("replicate", "shard", "tp"))
    return DeviceMesh(kind, torch.tensor(groups), mesh_dim_names=("dp", "tp"))
