"""Convert a model, in place, into one whose units are sharded over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.model_state import attach_state
from trimtab.sharding.dropout import key_dropout
from trimtab.sharding.find_units import FoundBlock, features, find_blocks, is_transposed
from trimtab.sharding.group import TensorGroup
from trimtab.sharding.projection import InProjection, OutProjection
from trimtab.sharding.unit_axis import UnitAxis
from trimtab.sharding.unit_block import ShardedModel, UnitBlock, UnitTensor, find_sharded_model, grown
from trimtab.sharding.unit_kinds import Attention, Mlp, UnitKind
from trimtab.sharding.unit_table import UnitTable
from trimtab.sharding.verify import verify_at_first_forward, verify_example


def convert(
    model: nn.Module,
    group: TensorGroup,
    share: Callable[[Mapping[str, tuple[int, int]]], Mapping[str, UnitTable]],
    *,
    kinds: Mapping[type[nn.Module], UnitKind | Sequence[UnitKind]],
    replicate: Sequence[str],
    headroom: float,
    seed: int,
    replica: int,
) -> ShardedModel:
    """Keep only this rank's units of every block. The parameters of rank 0 are broadcast.

    Everything is checked before anything is changed. Only declared modules are compared with the unsharded ones once
    more, in their first forward pass, with the inputs of the job.

    Args:
        share: returns the table of every block, given for each its number of units and the bytes of one unit.
    """
    if find_sharded_model(model) is not None:
        raise TrimtabError("tensor_parallel: this model is already tensor-parallel")
    blocks = find_blocks(model, kinds, replicate)
    _refuse_shared(model, blocks)
    sharded = ShardedModel(group=group, seed=seed, replica=replica, headroom=headroom)
    sizes = [_sizes(each) for each in blocks]
    for each, (units, *_) in zip(blocks, sizes, strict=True):
        if units < group.size:
            raise TrimtabError(
                f"tensor_parallel: {each.name} ({type(each.parent).__name__}) has {units} units for "
                f"{group.size} ranks; use at most {units} ranks, or replicate it with "
                f"replicate=[{each.path!r}]"
            )
    tables = share(
        {
            each.name: (units, _parameter_bytes(each, widths) // units)
            for each, (units, _, widths) in zip(blocks, sizes, strict=True)
        }
    )
    declared = {(type(each.parent), each.kind): each for each in reversed(blocks) if each.declared}.values()
    for each in declared:
        trial = replace(each, parent=copy.deepcopy(each.parent))
        verify_example(trial, _shard(trial, *_sizes(trial), tables[each.name], sharded))
    _broadcast(model, group)
    for each, (units, heads, widths) in zip(blocks, sizes, strict=True):
        sharded.blocks[each.name] = _shard(each, units, heads, widths, tables[each.name], sharded)
    key_dropout(model, sharded, {each.name: each for each in blocks})
    attach_state(model).tensor_parallel = sharded
    for each in declared:
        verify_at_first_forward(each, sharded.blocks[each.name])
    return sharded


def unit_count(found_block: FoundBlock) -> int:
    """Number of units of a block."""
    return _sizes(found_block)[0]


def _sizes(found_block: FoundBlock) -> tuple[int, int, dict[str, tuple[int, ...]]]:
    """Number of units, heads in one unit (0: an MLP), and for each projection the entries of one unit in each part."""
    parent, kind = found_block.parent, found_block.kind
    if isinstance(kind, Mlp):
        units = features(parent.get_submodule(kind.out))[0]
        return units, 0, dict.fromkeys((*kind.ins, kind.out), (1,))
    dim = int(getattr(parent, kind.head_dim))
    heads = features(parent.get_submodule(kind.out))[0] // dim
    if kind.qkv is not None:
        return heads, 1, {kind.qkv: (dim, dim, dim), kind.out: (dim,)}
    assert kind.query is not None
    assert kind.key is not None
    assert kind.value is not None
    units = features(parent.get_submodule(kind.key))[1] // dim
    heads_per_unit = heads // units
    wide, narrow = (heads_per_unit * dim,), (dim,)
    return units, heads_per_unit, {kind.query: wide, kind.key: narrow, kind.value: narrow, kind.out: wide}


def _head_counts(
    found_block: FoundBlock, kind: Attention, units: int, heads_per_unit: int
) -> Iterator[tuple[nn.Module, str, int]]:
    """The attributes that depend on the number of heads, each with its value for one unit."""
    parent = found_block.parent
    if kind.local_width:
        yield parent, kind.local_width, heads_per_unit * int(getattr(parent, kind.head_dim))
    for module in parent.modules():
        for name, value in vars(module).items():
            counts = "head" in name and not any(word in name for word in ("dim", "size", "width"))
            if counts and type(value) is int and name not in (kind.head_dim, kind.local_width):
                if value == units * heads_per_unit:
                    yield module, name, heads_per_unit
                elif value == units:
                    yield module, name, 1


def _parameter_bytes(found_block: FoundBlock, projections: Iterable[str]) -> int:
    return sum(found_block.parent.get_submodule(name).weight.nbytes for name in projections)  # type: ignore[misc]


def _shard(
    found_block: FoundBlock,
    units: int,
    heads: int,
    widths: dict[str, tuple[int, ...]],
    table: UnitTable,
    sharded: ShardedModel,
) -> UnitBlock:
    kind, group = found_block.kind, sharded.group
    block = UnitBlock(
        name=found_block.name,
        units=units,
        heads_per_unit=heads,
        parent=found_block.parent,
        local_widths=[] if isinstance(kind, Mlp) else list(_head_counts(found_block, kind, units, heads)),
        group=group,
        sharded=sharded,
        table=table,
        capacity=tuple(sharded.slots_for(count) for count in table.counts),
    )
    owned = torch.as_tensor(table.slots[group.rank])
    for name, parts in widths.items():
        full = found_block.parent.get_submodule(name)
        into = name != kind.out
        outputs_axis = 1 if is_transposed(full) else 0
        axes = {
            "weight": UnitAxis(units=units, axis=outputs_axis if into else 1 - outputs_axis, parts=parts),
            "bias": UnitAxis(units=units, axis=0, parts=parts),
        }
        by_unit = {
            attribute: (parameter, axis, _stored(parameter, axis, owned, sharded))
            for attribute, axis in axes.items()
            # The bias of the projection out is added once, to the sum over all units.
            if (parameter := getattr(full, attribute)) is not None and (into or attribute == "weight")
        }
        weight = by_unit["weight"][2]
        new: nn.Module
        if into:
            new = InProjection(block, weight, by_unit["bias"][2] if "bias" in by_unit else None, parts)
        else:
            new = OutProjection(block, weight, full.bias, sum(parts))  # type: ignore[arg-type]
        new.train(full.training)
        path = f"{found_block.path}.{name}".lstrip(".")
        block.tensors += [
            UnitTensor(
                name=f"{path}.{attribute}", module=new, attribute=attribute, axis=axis,
                full_shape=tuple(parameter.shape),
            )
            for attribute, (parameter, axis, _) in by_unit.items()
        ]  # fmt: skip
        holder, _, leaf = name.rpartition(".")
        setattr(found_block.parent.get_submodule(holder), leaf, new)
    block.adopt(table)
    return block


def _stored(full: nn.Parameter, axis: UnitAxis, owned: Tensor, sharded: ShardedModel) -> nn.Parameter:
    rows = sharded.slots_for(len(owned)) * axis.width
    return nn.Parameter(grown(axis.select(full.data, owned), rows), requires_grad=full.requires_grad)


def _refuse_shared(model: nn.Module, blocks: list[FoundBlock]) -> None:
    """Raise if a matrix is shared with another module: it cannot be sharded by units."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for each in blocks:
        for name in _sizes(each)[2]:
            for parameter in each.parent.get_submodule(name).parameters():
                if len(names[id(parameter)]) > 1:
                    raise TrimtabError(
                        f"tensor_parallel: {' and '.join(names[id(parameter)])} are one tensor, which cannot be "
                        f"sharded by units; replicate it with replicate=[{each.path!r}]"
                    )


def _broadcast(model: nn.Module, group: TensorGroup) -> None:
    """Broadcast the parameters and buffers of rank 0, as DistributedDataParallel does."""
    if group.size == 1:
        return
    source = dist.get_global_rank(group.process_group, 0)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            contiguous = tensor.contiguous()
            dist.broadcast(contiguous, source, group=group.process_group)
            if contiguous is not tensor:
                tensor.copy_(contiguous)
