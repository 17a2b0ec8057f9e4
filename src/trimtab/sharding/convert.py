"""Convert a model, in place, into one whose units are sharded over the ranks."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.environment import logger
from trimtab.errors import TrimtabError
from trimtab.model_state import attach_state
from trimtab.sharding.dropout.keyed import key_dropout
from trimtab.sharding.find_units import FoundBlock, find_blocks, head_width, projections_of, refuse_shared
from trimtab.sharding.group import TensorGroup
from trimtab.sharding.projection import InProjection, OutProjection
from trimtab.sharding.sequence.layers import divide_layers
from trimtab.sharding.sequence.plan import plan_layers
from trimtab.sharding.structure.adapt import (
    ADAPTATIONS,
    COUNTS,
    Adaptation,
    align_biases,
    local_widths,
    select_entries,
    share_parameters,
)
from trimtab.sharding.structure.check import FAILS, split_problem
from trimtab.sharding.structure.functional import adapt_attention, adapt_experts
from trimtab.sharding.structure.linear import (
    features,
    further_parameters,
    hooked,
    hooked_parameters,
    is_transposed,
)
from trimtab.sharding.structure.shapes import adapt_shapes
from trimtab.sharding.unit_axis import UnitAxis
from trimtab.sharding.unit_block import ShardedModel, UnitBlock, UnitTensor, find_sharded_model, grown
from trimtab.sharding.unit_kinds import AnyKind, Attention, Experts, Mlp, TorchAttention, UnitKind, Units
from trimtab.sharding.unit_table import UnitTable
from trimtab.sharding.verify import refusal, verify_at_first_forward, verify_example, verify_other_arguments
from trimtab.sharding.vocabulary.find import NAME as VOCABULARY
from trimtab.sharding.vocabulary.find import find_vocabulary
from trimtab.sharding.vocabulary.split import split_vocabulary, unit_bytes


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
    vocabulary: bool | tuple[str, ...] = False,
    sequence: bool = False,
) -> ShardedModel:
    """Keep only this rank's units of every block. The parameters of rank 0 are broadcast.

    Everything is checked before anything is changed. Declared modules, and those that no example has
    reached, are compared with the unsharded ones in their first forward pass, with the inputs of the job.

    Args:
        share: returns the table of every block, given for each its number of units and the bytes of one unit.
        vocabulary: as `find_vocabulary` takes it.
        sequence: whether layers work on parts of the sequence.
    """
    if find_sharded_model(model) is not None:
        raise TrimtabError("tensor_parallel: this model is already tensor-parallel")
    words = find_vocabulary(model, vocabulary)
    blocks, replicated = find_blocks(model, kinds, replicate)
    refuse_shared(model, blocks)
    splits: dict[str, Split] = {}
    chosen: dict[tuple[type[nn.Module], AnyKind], Adaptation] = {}
    for index, each in enumerate(blocks):
        split = split_of(each)
        if split.units < group.size:
            raise TrimtabError(
                f"tensor_parallel: {each.name} ({type(each.parent).__name__}) has {split.units} units for "
                f"{group.size} ranks; use at most {split.units} ranks, or replicate it with "
                f"replicate=[{each.path!r}]"
            )
        known = chosen.get((type(each.parent), each.kind))
        adaptation, problem = _adaptation(each, split, known)
        if problem.startswith(FAILS) and isinstance(each.kind, (Mlp, Attention)):
            blocks[index], problem = replace(each, call=None), ""  # checked in its first forward pass
        if not problem:
            chosen[type(each.parent), each.kind] = adaptation
            splits[each.name] = replace(split, adaptation=adaptation)
        elif each.declared:
            raise refusal(each, problem)
        else:
            replicated.update({f"{each.path}.{name}".strip("."): problem for name in split.widths or ("",)})
    blocks = [each for each in blocks if each.name in splits]
    if not blocks:
        raise TrimtabError(
            f"tensor_parallel: no units in this {type(model).__name__}: {listed(replicated) or 'no linear maps'}; "
            "declare its units with kinds={Type: Mlp(...) or Attention(...)}"
        )
    plans = plan_layers(model, blocks) if sequence else {}
    sizes = {} if words is None else {VOCABULARY: (words.entries, unit_bytes(words))}
    _require_agreement(model, splits, sizes, group)
    sharded = ShardedModel(group=group, seed=seed, replica=replica, headroom=headroom, replicated=replicated)
    sizes |= {name: (split.units, _parameter_bytes(split) // split.units) for name, split in splits.items()}
    tables = share(sizes)
    unchecked = [each for each in blocks if each.call is None]
    declared = {
        (type(each.parent), each.kind): each for each in reversed(unchecked) if each.declared
    }.values()
    for each in declared:
        trial = replace(each, parent=copy.deepcopy(each.parent))
        verify_example(trial, _shard(trial, split_of(trial), tables[each.name], sharded))
    broadcast_state(model, group.process_group)
    if words is not None:
        sharded.blocks[VOCABULARY] = split_vocabulary(model, words, tables[VOCABULARY], sharded)
    for each in blocks:
        sharded.blocks[each.name] = _shard(each, splits[each.name], tables[each.name], sharded)
    if plans:
        divide_layers(model, plans, sharded)
    key_dropout(model, sharded, {each.name: each for each in blocks})
    attach_state(model).tensor_parallel = sharded
    for each in blocks:
        if each.declared or each.call is None:  # not run on an example: its name alone says little
            verify_at_first_forward(each, sharded.blocks[each.name])
        elif isinstance(each.kind, (Mlp, Attention, Units)):
            verify_other_arguments(each, sharded.blocks[each.name])
    if replicated and group.rank == 0:
        logger().warning("tensor_parallel: replicated on every rank: %s", listed(replicated))
    return sharded


def listed(reasons: Mapping[str, str]) -> str:
    """Names with the reason, one for those that differ only in the number of their layer."""
    merged: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        alike = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        merged.setdefault((alike, re.sub(r"(?<![^.])\d+(?![^.])", "*", reason)), []).append(name)
    return "; ".join(
        f"{names[0] if len(names) == 1 else alike} ({reason})" for (alike, reason), names in merged.items()
    )


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a block divides into units."""

    units: int
    heads: int
    """Heads in one unit; 0 for an MLP or experts."""

    widths: dict[str, tuple[int, ...]]
    """For each projection the entries of one unit in each part."""

    weights: tuple[nn.Parameter, ...]
    adaptation: Adaptation = COUNTS


def split_of(found_block: FoundBlock) -> Split:
    """How a block divides into units."""
    parent, kind = found_block.parent, found_block.kind
    if isinstance(kind, TorchAttention):
        attention: Any = parent
        weights = (attention.in_proj_weight, attention.out_proj.weight)
        return Split(
            units=attention.num_heads,
            heads=1,
            widths={"in_proj": (attention.head_dim,) * 3, kind.out: (attention.head_dim,)},
            weights=weights,
        )
    if isinstance(kind, Experts):
        stacked = tuple(parent.get_parameter(name) for name in kind.names)
        return Split(units=stacked[0].shape[0], heads=0, widths={}, weights=stacked)
    units, heads, widths = _sizes(parent, kind)
    linears = (parent.get_submodule(name).weight for name in widths)
    return Split(units=units, heads=heads, widths=widths, weights=tuple(linears))  # type: ignore[arg-type]


def _adaptation(each: FoundBlock, split: Split, known: Adaptation | None) -> tuple[Adaptation, str]:
    """What the module needs to compute some of its units, found by trial; or why it cannot."""
    if each.problem:
        return COUNTS, each.problem
    found_by_name = not isinstance(each.kind, Units)
    alone = isinstance(each.kind, (TorchAttention, Experts))
    for name, module in projections_of(each.parent, each.kind).items():
        further = () if alone else further_parameters(module)
        if further:
            return COUNTS, f"{name} has more than a weight and a bias: {', '.join(further)}"
    with_hooks = [name for name, module in projections_of(each.parent, each.kind).items() if hooked(module)]
    if alone and hooked_parameters(each.parent):
        with_hooks.append(type(each.parent).__name__)
    if with_hooks:
        what = " and ".join(with_hooks)
        return COUNTS, f"hooks are registered on {what} or its parameters, which the units would not have"
    if each.call is None:
        return COUNTS, "" if isinstance(each.kind, (Mlp, Attention)) else "it was not run on example inputs"
    if split.units < 2:
        return COUNTS, ""
    first = [known] if known is not None else [COUNTS] if found_by_name else []
    problems = []
    for adaptation in dict.fromkeys([*first, *(() if alone else ADAPTATIONS)]):

        def shard(
            trial: nn.Module, table: UnitTable, group: TensorGroup, chosen: Any = adaptation
        ) -> UnitBlock:
            alone = ShardedModel(group=group, seed=0, replica=0, headroom=0.0)
            copied = replace(each, parent=trial)
            return _shard(copied, replace(split_of(copied), adaptation=chosen), table, alone)

        bias: Any = each.parent.get_submodule(each.kind.out).bias if each.kind.out else None
        out = "" if alone else each.kind.out
        problem = split_problem(
            each.parent, out, bias, split.units, each.call, shard, heads_leave=not each.keeps_heads
        )
        if not problem:
            return adaptation, ""
        problems.append(problem)
    return COUNTS, next((problem for problem in problems if "gradient" in problem), problems[0])


def _require_agreement(
    model: nn.Module, splits: Mapping[str, Split], others: Mapping[str, tuple[int, int]], group: TensorGroup
) -> None:
    layout: dict[str, Any] = dict(others)
    for name, s in splits.items():
        layout[name] = (s.units, s.heads, sorted(s.widths.items()), s.adaptation)
    group.require_agreement(
        repr(layout).encode(),
        next(model.parameters()).device,
        differs="tensor_parallel: rank {rank} has a model with other units than rank 0; give all ranks the same model",
        lost="tensor_parallel: a rank was lost while the ranks compared their models",
    )


def _sizes(parent: nn.Module, kind: Mlp | Attention | Units) -> tuple[int, int, dict[str, tuple[int, ...]]]:
    """Number of units, heads in one unit (0: an MLP), and for each projection the entries of one unit in each part."""
    hidden = features(parent.get_submodule(kind.out))[0]
    if isinstance(kind, Units):
        return hidden // kind.width, kind.heads, {**kind.parts, kind.out: (kind.width,)}
    if isinstance(kind, Mlp):
        return hidden, 0, dict.fromkeys((*kind.ins, kind.out), (1,))
    dim = int(head_width(parent, kind))
    heads = hidden // dim
    if kind.qkv is not None:
        return heads, 1, {kind.qkv: (dim, dim, dim), kind.out: (dim,)}
    assert kind.query is not None
    assert kind.key is not None
    assert kind.value is not None
    units = features(parent.get_submodule(kind.key))[1] // dim
    heads_per_unit = heads // units
    wide, narrow = (heads_per_unit * dim,), (dim,)
    return units, heads_per_unit, {kind.query: wide, kind.key: narrow, kind.value: narrow, kind.out: wide}


def _local_widths(found_block: FoundBlock, split: Split) -> Iterator[tuple[Any, str, int]]:
    """The attributes that depend on the number of units, each with its value for one unit."""
    parent, kind = found_block.parent, found_block.kind
    if isinstance(kind, Experts):
        yield parent, "num_experts", 1
        return
    if split.heads == 0 or isinstance(kind, TorchAttention):
        return
    width = split.widths[kind.out][0]
    fixed: tuple[str | None, ...] = ()
    if isinstance(kind, Attention):
        fixed = (kind.head_dim, kind.local_width)
        if kind.local_width:
            yield parent, kind.local_width, width
    yield from local_widths(parent, split.adaptation, split.units, split.heads, width, fixed)


def _parameter_bytes(split: Split) -> int:
    return sum(weight.nbytes for weight in split.weights)


def _shard(found_block: FoundBlock, split: Split, table: UnitTable, sharded: ShardedModel) -> UnitBlock:
    kind, group = found_block.kind, sharded.group
    block = UnitBlock(
        name=found_block.name,
        units=split.units,
        heads_per_unit=split.heads,
        parent=found_block.parent,
        local_widths=list(_local_widths(found_block, split)),
        group=group,
        sharded=sharded,
        table=table,
        capacity=tuple(sharded.slots_for(count) for count in table.counts),
    )
    if isinstance(kind, (TorchAttention, Experts)):
        for name in kind.names if isinstance(kind, Experts) else ("in_proj_weight", "in_proj_bias"):
            parts = (1,) if isinstance(kind, Experts) else split.widths["in_proj"]
            _own_parameter(found_block, block, name, UnitAxis(units=split.units, axis=0, parts=parts))
    for name, parts in split.widths.items():
        if name != "in_proj" or not isinstance(kind, TorchAttention):
            _projection(found_block, block, name, parts)
    if isinstance(kind, TorchAttention):
        adapt_attention(block)
    elif isinstance(kind, Experts):
        adapt_experts(block)
    elif split.heads and split.adaptation.bias:
        align_biases(block)
    elif split.heads and split.adaptation.entries:
        select_entries(block)
    if split.heads and split.adaptation.shapes:
        totals = {name: sum(parts) for name, parts in split.widths.items()}
        sizes = {part for parts in split.widths.values() for part in parts}
        adapt_shapes(block, [*sizes, *totals.values(), split.heads, 1], list(totals.values()))
    for name, parameters in found_block.inside:
        module = found_block.parent.get_submodule(name)
        by_head = split.adaptation.bias or (split.adaptation.entries and module is found_block.parent)
        # The gradient of a bias by head is summed where it is reduced to this rank's heads.
        shared = [
            each
            for each in parameters
            if not by_head or split.units * split.heads not in module.get_parameter(each).shape
        ]
        if shared:
            share_parameters(module, tuple(shared), block)
    block.adopt(table)
    return block


def _projection(found_block: FoundBlock, block: UnitBlock, name: str, parts: tuple[int, ...]) -> None:
    """Replace a linear map by this rank's part of it."""
    sharded, owned = block.sharded, torch.tensor(block.owned, dtype=torch.long)
    full = found_block.parent.get_submodule(name)
    into = name != found_block.kind.out
    outputs_axis = 1 if is_transposed(full) else 0
    axes = {
        "weight": UnitAxis(units=block.units, axis=outputs_axis if into else 1 - outputs_axis, parts=parts),
        "bias": UnitAxis(units=block.units, axis=0, parts=parts),
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
            name=f"{path}.{attribute}", module=new, attribute=attribute, into=into, axis=axis,
            full_shape=tuple(parameter.shape),
        )
        for attribute, (parameter, axis, _) in by_unit.items()
    ]  # fmt: skip
    holder, _, leaf = name.rpartition(".")
    setattr(found_block.parent.get_submodule(holder), leaf, new)


def _own_parameter(found_block: FoundBlock, block: UnitBlock, name: str, axis: UnitAxis) -> None:
    """Keep this rank's part of a parameter of the module itself."""
    parameter = getattr(found_block.parent, name)
    if parameter is None:
        return
    owned = torch.tensor(block.owned, dtype=torch.long)
    setattr(found_block.parent, name, _stored(parameter, axis, owned, block.sharded))
    block.tensors.append(
        UnitTensor(
            name=f"{found_block.path}.{name}".lstrip("."), module=found_block.parent, attribute=name, into=True,
            axis=axis, full_shape=tuple(parameter.shape),
        )
    )  # fmt: skip


def _stored(full: nn.Parameter, axis: UnitAxis, owned: Tensor, sharded: ShardedModel) -> nn.Parameter:
    rows = sharded.slots_for(len(owned)) * axis.width
    return nn.Parameter(grown(axis.select(full.data, owned), rows), requires_grad=full.requires_grad)


def broadcast_state(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Broadcast the parameters and buffers of the group's first rank, as DistributedDataParallel does."""
    if dist.get_world_size(group) == 1:
        return
    source = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            contiguous = tensor.contiguous()
            dist.broadcast(contiguous, source, group=group)
            if contiguous is not tensor:
                tensor.copy_(contiguous)
