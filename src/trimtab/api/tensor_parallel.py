"""`trimtab.tensor_parallel`: the units of a model spread over ranks, as many to each as it can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from trimtab import environment
from trimtab.errors import TrimtabError
from trimtab.measure.rank_speeds import measure_rank_speeds
from trimtab.planning.tensor.rebalance import Rules
from trimtab.planning.tensor.shares import BlockSize, share_blocks
from trimtab.sharding.convert import convert
from trimtab.sharding.group import TensorGroup
from trimtab.sharding.unit_table import UnitTable

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from trimtab.sharding.unit_kinds import UnitKind

    Shares = Sequence[float] | Mapping[str, Sequence[Sequence[int]]] | Literal["measured"] | None

_DIMENSION = "tp"
_BYTES_IN_TRAINING = 4
"""Times its parameters that a unit takes: parameter, gradient, and two states of an Adam."""


def tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    shares: Shares = None,
    headroom: float = 0.0,
    kinds: Mapping[type[nn.Module], UnitKind | Sequence[UnitKind]] | None = None,
    replicate: Sequence[str] = (),
    seed: int = 0,
    balance: Literal["auto"] | None = None,
    gamma_max: float = 0.0,
) -> nn.Module:
    """Spread the hidden units and heads of a model over the ranks of a mesh; in place, and returns the model.

    Every rank calls it with the same model and arguments, before making the optimiser (parameters are new
    objects) and before wrapping in DistributedDataParallel. Training then equals that of a single device up to the
    order of summation, for any shares. What is no unit (embeddings, norms, heads) is on every rank, with
    rank 0's values, and gets the same gradient everywhere.

    Args:
        mesh: of one dimension, or with a dimension called ``tp``; the others are for data parallelism.
        shares: how the units are shared: None evenly; one number for each rank, in proportion to it;
            ``"measured"`` by the speed of a matrix product and the free memory of each; or for each block by name the
            units of each rank (`trimtab.tensor_parallel.assignment`).
        headroom: room for more units on each rank, as a part of what it has: `move` then changes no sizes.
        kinds: how modules of own types are made of units: `Mlp`, `Attention`, or several.
        replicate: patterns of module names to leave whole on every rank.
        seed: of dropout, which is keyed by unit and needs no agreement with torch's random state.
        balance: ``"auto"`` watches the ranks while the job runs, and when one is slow moves part of its work to the
            others where that pays; see `trimtab.control.tensor.balancer`. Training stays exact.
        gamma_max: with ``balance="auto"``, the most of a slow rank's work that may be left out for a while instead,
            which changes the training.
    """
    if balance not in (None, "auto"):
        raise TrimtabError(f"tensor_parallel: balance={balance!r} is unknown; the one word is 'auto'")
    if gamma_max and balance is None:
        raise TrimtabError(f"tensor_parallel: gamma_max={gamma_max:g} is for balance='auto'; give both")
    group, replica = _group(mesh)
    if headroom < 0:
        raise TrimtabError(
            f"tensor_parallel: headroom={headroom:g} is below 0; it is a part of a rank's units"
        )
    if environment.disabled() and shares is not None:
        environment.logger().info("TRIMTAB_DISABLE is set: units are shared evenly")
        shares = None
    convert(
        model,
        group,
        lambda blocks: _tables(blocks, shares, group, next(model.parameters())),
        kinds=kinds or {},
        replicate=replicate,
        headroom=headroom,
        seed=seed,
        replica=replica,
    )
    if balance is not None and not environment.disabled():
        from trimtab.control.tensor.balancer import balance as keep_even

        keep_even(model, Rules(gamma_max=gamma_max))
    return model


def _group(mesh: DeviceMesh) -> tuple[TensorGroup, int]:
    """The ranks to spread units over, and which of the model's copies this is."""
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and _DIMENSION not in names:
        raise TrimtabError(
            f"tensor_parallel: the mesh has the dimensions {names or mesh.ndim}; give one of them, "
            f"mesh['NAME'], or call it {_DIMENSION!r}"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise TrimtabError("tensor_parallel: this rank is not in the mesh; call it only on ranks that are")
    along = mesh[_DIMENSION] if mesh.ndim > 1 else mesh
    group = along.get_group()
    members = TensorGroup(process_group=group, rank=along.get_local_rank(), size=along.size())
    if mesh.ndim == 1:
        return members, dist.get_process_group_ranks(group)[0]
    replica = 0
    for name, size, place in zip(names, mesh.shape, coordinate, strict=True):
        replica = replica if name == _DIMENSION else replica * size + place
    return members, replica


def _tables(
    blocks: Mapping[str, tuple[int, int]], shares: Shares, group: TensorGroup, like: torch.Tensor
) -> dict[str, UnitTable]:
    if isinstance(shares, Mapping):
        for name in [*(shares.keys() - blocks.keys()), *(blocks.keys() - shares.keys())]:
            raise TrimtabError(
                f"tensor_parallel: shares and the model do not both have {name}; "
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
    if shares is None:
        speeds = [1.0] * group.size
    elif isinstance(shares, str):
        if shares != "measured":
            raise TrimtabError(f"tensor_parallel: shares={shares!r} is unknown; the one word is 'measured'")
        speeds, memory = measure_rank_speeds(group, like.device, like.dtype)
        if group.rank == 0:
            said = ", ".join(f"{speed / max(speeds):.2f}" for speed in speeds)
            environment.logger().info(f"tensor_parallel: units are shared by the measured speeds {said}")
    else:
        speeds = [float(share) for share in shares]
        if len(speeds) != group.size:
            raise TrimtabError(
                f"tensor_parallel: shares has {len(speeds)} numbers for {group.size} ranks; give one for each"
            )
    counts = share_blocks(sizes, speeds, memory_bytes=memory)
    return {name: UnitTable.consecutive(count) for name, count in counts.items()}
