"""`trimtab.tensor_parallel`: shard the hidden units and heads of a model, as many per rank as it can handle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trimtab import environment
from trimtab.control.plans.active_plan import agree_on_plan, read_plan
from trimtab.control.plans.tensor_layout import planned_shares
from trimtab.control.tensor.replicas import UnitReplicas
from trimtab.errors import TrimtabError
from trimtab.measure.fingerprint import fingerprint
from trimtab.measure.tensor_ranks import measure_rank_speeds
from trimtab.model_state import attach_state
from trimtab.planning.plan import Plan
from trimtab.planning.tensor.balance import Balance
from trimtab.planning.tensor.shares import BlockSize, share_blocks
from trimtab.sharding.convert import broadcast_state, convert
from trimtab.sharding.group import TensorGroup
from trimtab.sharding.unit_kinds import UnitKind
from trimtab.sharding.unit_table import UnitTable

Shares = (
    Sequence[float]
    | Mapping[str, Sequence[Sequence[int]]]
    | Literal["measured"]
    | Plan
    | str
    | PathLike[str]
    | None
)

_DIMENSION = "tp"
_BYTES_IN_TRAINING = 4
"""Memory of a unit over that of its parameters: parameter, gradient, and two Adam states."""


def tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    shares: Shares = None,
    headroom: float = 0.0,
    kinds: Mapping[type[nn.Module], UnitKind | Sequence[UnitKind]] | None = None,
    replicate: Sequence[str] = (),
    vocabulary: bool | tuple[str, ...] = False,
    sequence: bool = False,
    seed: int = 0,
    balance: Balance | Literal["auto"] | None = None,
) -> nn.Module:
    """Shard the hidden units and heads of a model over the ranks of a mesh; in place, and returns the model.

    Every rank calls it with the same model and arguments, before creating the optimizer (parameters are new
    objects) and before wrapping in DistributedDataParallel. Training then equals that of a single device up to the
    order of summation, for any shares. Everything else (norms, and without `vocabulary` embeddings and the output
    head) is replicated with rank 0's values and gets the same gradient on every rank.

    Args:
        mesh: with one dimension, or with a dimension called ``tp``; the others are for data parallelism. With two
            dimensions, tensor groups may have different shares, and with ``balance="auto"`` each is balanced by itself;
            the gradients of a unit are averaged wherever it is, and the rest by DistributedDataParallel.
        shares: how units are divided: None for evenly; one number per rank, in proportion to it;
            ``"measured"`` by each rank's matrix-product speed and free memory; a plan with tensor groups or the
            path of its file, as it says; or for each block by name the units of each rank
            (`trimtab.sharding.assignment`).
        headroom: space for more units on each rank, as a fraction of its units: `move` then changes no sizes.
        kinds: the units of your own module types: `Mlp`, `Attention`, or several.
        replicate: patterns of module names to replicate on every rank.
        vocabulary: divide the embedding and the output head by vocabulary too: True for those that are found, or their
            names. ``cross_entropy`` then computes the loss from each rank's logits; any other use of the logits
            gathers them, and is a collective.
        sequence: divide the activations between blocks along the sequence: norms, dropout and residuals then work on
            each rank's places, and a rank keeps only these for the backward pass. Layers in which this would change
            the result are refused.
        seed: seed of dropout, which is keyed by unit and independent of torch's random state.
        balance: ``"auto"`` times the ranks while the job runs, and when one is slow moves part of its work to
            others where that pays, exactly; a `trimtab.Balance` says when and how, and whether a slow rank may
            leave work out, which changes the training.
    """
    rules = Balance() if balance == "auto" else balance
    if not isinstance(rules, Balance | None):
        raise TrimtabError(
            f"tensor_parallel: balance={balance!r} is unknown; use 'auto', a trimtab.Balance, or None"
        )
    resize = 0.0 if rules is None else rules.resize
    if resize and vocabulary:
        raise TrimtabError(
            "tensor_parallel: a vocabulary cannot be pruned; use Balance(resize=0) or vocabulary=False"
        )
    if not isinstance(model, nn.Module):
        raise TrimtabError(f"tensor_parallel: expected an nn.Module, got {type(model).__name__}")
    if not isinstance(mesh, DeviceMesh):
        raise TrimtabError(
            f"tensor_parallel: expected a DeviceMesh, got {mesh!r}; make one of all ranks with "
            "torch.distributed.device_mesh.init_device_mesh('cpu' or 'cuda', (dist.get_world_size(),))"
        )
    group, replica = _group(mesh)
    if headroom < 0:
        raise TrimtabError(
            f"tensor_parallel: headroom must be at least 0, got {headroom:g}; it is a fraction of a rank's units"
        )
    if environment.disabled() and shares is not None:
        environment.logger().info("TRIMTAB_DISABLE is set: units are divided evenly")
        shares = None
    whole = fingerprint(model)
    replicas = _replicas(mesh, group)
    if resize and replicas is not None:
        raise TrimtabError(
            f"tensor_parallel: resize={resize:g} on a mesh with {mesh.size() // group.size} replicas, which "
            "would leave out different work and drift apart; use resize=0, which is exact"
        )
    balanced = rules is not None and not environment.disabled()
    divided: list[UnitReplicas] = []  # filled if the replicas divide the units by themselves

    def share(blocks: Mapping[str, tuple[int, int]]) -> Mapping[str, UnitTable]:
        tables = _tables(blocks, shares, group, next(model.parameters()))
        if replicas is not None and (replicas.differ(tables) or balanced):
            divided.append(replicas)
            broadcast_state(model, replicas.data_group)  # DDP does not broadcast the units then
        return tables

    sharded = convert(
        model,
        group,
        share,
        kinds=kinds or {},
        replicate=replicate,
        headroom=headroom,
        seed=seed,
        replica=replica,
        vocabulary=vocabulary,
        sequence=sequence,
    )
    attach_state(model).whole_fingerprint = whole
    for each in divided:
        each.attach(model, sharded)
    if balanced:
        from trimtab.control.tensor.balancer import balance as keep_even

        keep_even(model, rules)
    return model


def _group(mesh: DeviceMesh) -> tuple[TensorGroup, int]:
    """The ranks to shard over, and the index of this replica of the model."""
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and _DIMENSION not in names:
        raise TrimtabError(
            f"tensor_parallel: the mesh has the dimensions {names or mesh.ndim}; pass one of them, "
            f"mesh['NAME'], or name it {_DIMENSION!r}"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise TrimtabError("tensor_parallel: this rank is not in the mesh; call it only on ranks of the mesh")
    dimension = mesh[_DIMENSION] if mesh.ndim > 1 else mesh
    group = dimension.get_group()
    members = TensorGroup(process_group=group, rank=dimension.get_local_rank(), size=dimension.size())
    if mesh.ndim == 1:
        return members, dist.get_process_group_ranks(group)[0]
    replica = 0
    for name, size, place in zip(names, mesh.shape, coordinate, strict=True):
        replica = replica if name == _DIMENSION else replica * size + place
    return members, replica


def _replicas(mesh: DeviceMesh, group: TensorGroup) -> UnitReplicas | None:
    """The replicas of the model, where units can be averaged one by one: a mesh of all ranks with two dimensions."""
    every = mesh.ndim == 2 and mesh.size() == dist.get_world_size()
    return UnitReplicas(mesh, _DIMENSION) if every and 1 < group.size < mesh.size() else None


def _tables(
    blocks: Mapping[str, tuple[int, int]], shares: Shares, group: TensorGroup, like: torch.Tensor
) -> dict[str, UnitTable]:
    if isinstance(shares, Mapping):
        for name in [*(shares.keys() - blocks.keys()), *(blocks.keys() - shares.keys())]:
            raise TrimtabError(
                f"tensor_parallel: {name} is in only one of shares and the model; "
                f"give the units of each rank for {', '.join(blocks)}"
            )
        return {
            name: UnitTable.of(name, blocks[name][0], lists, group.size) for name, lists in shares.items()
        }
    sizes = {
        name: BlockSize(units=units, unit_bytes=each * _BYTES_IN_TRAINING)
        for name, (units, each) in blocks.items()
    }
    memory: list[float | None] | None = None
    if isinstance(shares, (Plan, PathLike)) or (isinstance(shares, str) and shares.endswith(".json")):
        members = tuple(dist.get_process_group_ranks(group.process_group))
        source = shares
        plan = agree_on_plan(lambda: read_plan(source), group.process_group)
        shares = planned_shares(plan, members)
    if shares is None:
        speeds = [1.0] * group.size
    elif isinstance(shares, str):
        if shares != "measured":
            raise TrimtabError(
                f"tensor_parallel: shares={shares!r} is unknown; the only word is 'measured', and the path of a plan "
                "ends in .json"
            )
        speeds, memory = measure_rank_speeds(group, like.device, like.dtype)
        if group.rank == 0:
            relative = ", ".join(f"{speed / max(speeds):.2f}" for speed in speeds)
            environment.logger().info(f"tensor_parallel: units are divided by the measured speeds {relative}")
    else:
        speeds = [float(share) for share in shares]
        if len(speeds) != group.size:
            raise TrimtabError(
                f"tensor_parallel: shares has {len(speeds)} numbers for {group.size} ranks; give one for each"
            )
    counts = share_blocks(sizes, speeds, memory_bytes=memory)
    return {name: UnitTable.consecutive(count) for name, count in counts.items()}
