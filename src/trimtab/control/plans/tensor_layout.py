"""What a plan's tensor groups demand of a model and of a loader."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.errors import TrimtabError
from trimtab.planning.plan import Plan
from trimtab.precision.operators import is_projection
from trimtab.sharding.unit_block import find_sharded_model

_WAY_OUT = (
    "build the plan's mesh and shard the model before DDP: mesh = trimtab.mesh(plan); "
    "trimtab.tensor_parallel(model, mesh, shares=plan)"
)


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that a plan for this model is about: all of them if it is sharded over some, else those of DDP."""
    if isinstance(model, DistributedDataParallel) and find_sharded_model(model) is None:
        return model.process_group
    return None


def require_layout(model: nn.Module, plan: Plan) -> None:
    """Raise if the model is not sharded over the plan's tensor groups."""
    sharded = find_sharded_model(model)
    if sharded is None:
        if plan.tensor_groups:
            raise TrimtabError(
                f"the plan has tensor groups of {plan.tensor_size} ranks, and this model is not sharded; {_WAY_OUT}"
            )
        return
    own = tuple(dist.get_process_group_ranks(sharded.group.process_group))
    if own not in plan.tensor_groups:
        groups = ", ".join(map(str, plan.tensor_groups[:4])) or "none"
        raise TrimtabError(
            f"the model is sharded over ranks {own}, and the plan's tensor groups are {groups}; {_WAY_OUT}, or make a "
            f"plan with `trimtab plan --layout {len(own)}`"
        )
    if isinstance(model, DistributedDataParallel):
        _, peers = _peers(plan.tensor_groups)
        averaged = sorted(dist.get_process_group_ranks(model.process_group))
        if averaged != sorted(peers):
            raise TrimtabError(
                f"DistributedDataParallel averages the gradients of ranks {averaged}, which hold other units; with the "
                f"plan's tensor groups this rank averages with ranks {peers}: "
                'DistributedDataParallel(model, process_group=mesh.get_group("dp"))'
            )
    root = model.module if isinstance(model, DistributedDataParallel) else model
    divided = {name for name, module in root.named_modules() if is_projection(module)}
    for group in plan.tensor_groups:
        first, *others = (plan.roles[plan.role_of(rank)].precisions for rank in group)
        for other in others:
            unlike = sorted(name for name in {*first, *other} - divided if first.get(name) != other.get(name))
            if unlike:
                raise TrimtabError(
                    f"the plan lowers {unlike[0]!r} on some of ranks {list(group)} only; they hold one copy of the "
                    "model together and all compute this operator, so their copies of its weights would drift "
                    "apart: give them the same precision, or make a new plan with `trimtab plan`"
                )


def planned_shares(plan: Plan, members: tuple[int, ...]) -> list[float]:
    """The plan's share of the units for each of the ranks that hold a copy of the model together."""
    if members not in plan.tensor_groups:
        groups = ", ".join(map(str, plan.tensor_groups[:4])) or "none"
        raise TrimtabError(
            f"tensor_parallel: the mesh shards over ranks {members}, and the plan's tensor groups are {groups}; use "
            "mesh = trimtab.mesh(plan)"
        )
    return [plan.roles[plan.role_of(rank)].tensor_share for rank in members]


def group_share(
    tensor_groups: tuple[tuple[int, ...], ...], group: dist.ProcessGroup | None
) -> tuple[int, int]:
    """The place of this rank's samples and the number of places: ranks of a tensor group share one.

    Raises:
        TrimtabError: `group` is not that of the ranks in the same place of all tensor groups.
    """
    rank, peers = _peers(tensor_groups)
    if sorted(dist.get_process_group_ranks(group or dist.group.WORLD)) != sorted(peers):
        raise TrimtabError(
            f"loader: the plan has tensor groups, and this rank averages gradients with ranks {peers}; pass "
            'group=mesh.get_group("dp") of mesh = trimtab.mesh(plan), or the DDP module as plan'
        )
    return peers.index(rank), len(peers)


def _peers(tensor_groups: tuple[tuple[int, ...], ...]) -> tuple[int, list[int]]:
    """This rank, and the ranks in its place of all tensor groups, which hold the same units."""
    rank = dist.get_rank()
    place = next(members.index(rank) for members in tensor_groups if rank in members)
    return rank, [members[place] for members in tensor_groups]
