"""Permanent migration: units move to another rank, with their optimizer state, between two steps.

The steps, the same on every rank:

1. Check the new table of every block; an invalid one raises before anything changes.
2. Compare the arguments and optimizer states of all ranks (one all-gather of 32 bytes).
3. For each block that changes, in the model's order: one all-to-all of exactly the slices of the units that leave,
   for the parameters and each optimizer state of the same shape.
4. Units that stay keep their slots and arriving units take free ones. Where slots are missing (or, without headroom,
   left over), new tensors are allocated under the same parameter objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.sharding.unit_block import ShardedModel, UnitBlock, UnitTensor, grown, sharded_model
from trimtab.sharding.unit_table import UnitTable

Assignment = Mapping[str, Sequence[Sequence[int]]]
"""For each block, by name, the units of each rank."""
States = dict[int, list[tuple[dict[str, Any], str]]]


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The result of a move."""

    units: int
    """Number of units that changed their rank, over all ranks."""

    sent_bytes: int
    """Bytes that this rank sent."""

    received_bytes: int


def assignment(model: nn.Module) -> dict[str, list[list[int]]]:
    """The units of each rank, for each block, in the form that `move` takes."""
    blocks = sharded_model(model, "assignment").blocks.values()
    return {block.name: [owned.tolist() for owned in block.table.slots] for block in blocks}


def assignment_for(model: nn.Module, counts: Mapping[str, Sequence[int]]) -> dict[str, list[list[int]]]:
    """The assignment with these numbers of units on each rank, for the named blocks, that moves the fewest units."""
    sharded = sharded_model(model, "assignment_for")
    return {
        name: [
            owned.tolist()
            for owned in sharded.block(name, "assignment_for").table.with_counts(block_counts).slots
        ]
        for name, block_counts in counts.items()
    }


def move(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    assignment: Assignment,
) -> Moved:
    """Move units to other ranks. Exact: the next step computes what it would have computed.

    Every rank calls it, with the same assignment, between a step and the next forward pass; gradients are dropped.
    Parameters stay the same objects, so the optimizer can be used as before. Under DistributedDataParallel all replicas
    have the same assignment, and sizes must not change: convert the model with `headroom`. If replicas divide the
    units differently, each has an assignment of its own, of any size.

    Args:
        optimizer: the optimizer, or all optimizers, of the model; None if there is none.
        assignment: for each block, by name, the units of each rank; other blocks do not change.
    """
    moved = move_in_replica(model, optimizer, assignment)
    replicas = sharded_model(model, "move").replicas
    if replicas is not None:
        replicas.share_tables()
    return moved


def move_in_replica(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    assignment: Assignment,
) -> Moved:
    """As `move`, on the ranks of one replica; `Replicas.share_tables` must follow on all ranks."""
    sharded = sharded_model(model, "move")
    sharded.check()
    tables = {}
    for name, lists in assignment.items():
        block = sharded.block(name, "move")
        owners = UnitTable.of(name, block.units, lists, sharded.group.size).owners()
        table = block.table.with_owners(owners)
        if not all(np.array_equal(a, b) for a, b in zip(table.slots, block.table.slots, strict=True)):
            tables[name] = table
    states = _states(sharded, _optimizers(optimizer))
    if isinstance(model, nn.parallel.DistributedDataParallel) and sharded.replicas is None:
        _refuse_new_sizes(sharded, tables)
    _require_agreement(sharded, tables, states)
    units = sent = received = 0
    for name, block in sharded.blocks.items():  # in the order of the model, not of the mapping
        if name in tables:
            try:
                out, into = _exchange(block, tables[name], states)
            except RuntimeError as error:
                sharded.broken = (
                    f"move: a rank was lost while units of {name} were in flight, so some units are lost; "
                    "stop this job and resume it from its last checkpoint, which has every unit"
                )
                raise TrimtabError(sharded.broken) from error
            units += int((tables[name].owners() != block.table.owners()).sum())
            sent, received = sent + out, received + into
            block.adopt(tables[name])
    return Moved(units=units, sent_bytes=sent, received_bytes=received)


def can_move(model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> bool:
    """Whether `move` supports these optimizers: their states can be split by unit, and none is missing."""
    optimizers = _optimizers(optimizer)
    try:
        _states(sharded_model(model, "can_move"), optimizers)
    except TrimtabError:
        return False
    return bool(optimizers)


def _optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())


def _states(sharded: ShardedModel, optimizers: Sequence[torch.optim.Optimizer]) -> States:
    """By id of the parameter, its optimizer states that are stored by unit, as (dictionary, key)."""
    held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    states: States = {}
    for _, tensor in sharded.tensors():
        parameter = tensor.parameter
        places = states[id(parameter)] = []
        for optimizer in optimizers:
            state = optimizer.state.get(parameter, {})
            for key in sorted(state):
                value = state[key]
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    places.append((state, key))
                elif isinstance(value, Tensor) and value.ndim > 0:
                    raise TrimtabError(
                        f"move: {type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for "
                        f"{tensor.name} of shape {tuple(parameter.shape)}, which cannot be split by unit; use an "
                        "elementwise optimizer"
                    )
        if optimizers and parameter.requires_grad and id(parameter) not in held:
            raise TrimtabError(
                f"move: {tensor.name} is in none of the optimizers; pass all optimizers of the model, "
                "so that their state moves too"
            )
    return states


def _refuse_new_sizes(sharded: ShardedModel, tables: Mapping[str, UnitTable]) -> None:
    for name, table in tables.items():
        block = sharded.blocks[name]
        slots = zip(table.counts, block.capacity, block.capacity_for(table), strict=True)
        for rank, (count, before, after) in enumerate(slots):
            if before != after:
                raise TrimtabError(
                    f"move: {name} would have {count} units on rank {rank}, which has room for {before}; "
                    "DistributedDataParallel does not support new sizes: convert with headroom, or move the inner "
                    "module and wrap it again"
                )


def _require_agreement(sharded: ShardedModel, tables: Mapping[str, UnitTable], states: States) -> None:
    settings = [repr((name, table.owners().tolist())) for name, table in sorted(tables.items())]
    for _, tensor in sharded.tensors():
        dtypes = [(key, str(state[key].dtype)) for state, key in states[id(tensor.parameter)]]
        settings.append(repr((tensor.name, str(tensor.parameter.dtype), dtypes)))
    sharded.group.require_agreement(
        repr(settings).encode(),
        sharded.device,
        differs="move: rank {rank} has another assignment than rank 0, or other optimizer states; call move on every "
        "rank with the same assignment, after the same steps",
        lost="move: a rank was lost before any unit moved; resume the job from its last checkpoint",
    )


@torch.no_grad()
def _exchange(block: UnitBlock, table: UnitTable, states: States) -> tuple[int, int]:
    """Exchange the moving units and put every unit into its slot; returns the bytes sent and received."""
    rank, size = block.group.rank, block.group.size
    before, after = block.table.owners(), table.owners()
    moving = np.flatnonzero(before != after)
    slot_before, slot_after = _slots(block.table, rank), _slots(table, rank)
    leaves = [slot_before[moving[(before[moving] == rank) & (after[moving] == to)]] for to in range(size)]
    comes = [
        slot_after[moving[(before[moving] == source) & (after[moving] == rank)]] for source in range(size)
    ]
    stored = [
        (tensor, value)
        for tensor in block.tensors
        for value in (tensor.parameter.data, *(state[key] for state, key in states[id(tensor.parameter)]))
    ]
    arrived = _all_to_all(stored, leaves, comes, block.group.process_group) if size > 1 else []
    received = sum(sum(piece.nbytes for piece in pieces) for pieces in arrived)
    sent = sum(len(slots) * _row_bytes(*pair) for pair in stored for slots in leaves)
    index = 0
    for tensor in block.tensors:
        parameter = tensor.parameter
        parameter.grad = None
        holders = [None, *states[id(parameter)]]
        for holder in holders:
            value = parameter.data if holder is None else holder[0][holder[1]]
            new = _placed(tensor, value, block, table, comes, [pieces[index] for pieces in arrived])
            index += 1
            if holder is None:
                _replace(parameter, new)
            else:
                holder[0][holder[1]] = new
    return sent, received


def _replace(parameter: nn.Parameter, new: Tensor) -> None:
    """Replace the data of a parameter object, possibly by data of another size."""
    if new.shape != parameter.shape:
        # A loss that is still alive keeps the parameter's autograd node, which expects gradients of the old size.
        # torch creates a new node only after a change of dtype.
        other = torch.float64 if new.dtype != torch.float64 else torch.float32
        parameter.data = new.new_empty(0, dtype=other)
    parameter.data = new


def _placed(
    tensor: UnitTensor,
    value: Tensor,
    block: UnitBlock,
    table: UnitTable,
    comes: list[Any],
    pieces: list[Tensor],
) -> Tensor:
    """The tensor after the move: in place if its slots suffice, else newly allocated."""
    rank, width = block.group.rank, tensor.axis.width
    old, new = block.table.slots[rank], table.slots[rank]
    capacity = block.capacity_for(table)[rank]
    slot_of = _slots(block.table, rank)
    common = min(len(old), len(new))
    # Slots that get a unit from another slot of this rank, one past the new end.
    shifted = np.flatnonzero((new[:common] != old[:common]) & (slot_of[new[:common]] >= 0))
    sources = tensor.by_unit(value)[torch.as_tensor(slot_of[new[shifted]], device=value.device)]
    stored = value if capacity == block.capacity[rank] else grown(value, capacity * width)
    rows = tensor.by_unit(stored)
    rows[torch.as_tensor(shifted, device=value.device)] = sources
    for slots, piece in zip(comes, pieces, strict=True):
        rows[torch.as_tensor(slots, device=value.device)] = piece
    rows[len(new) :] = 0
    return stored


def _all_to_all(
    stored: list[tuple[UnitTensor, Tensor]], leaves: list[Any], comes: list[Any], group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """Send the rows of these slots to each rank; returns, for each rank and tensor, the rows received from it."""
    device = stored[0][1].device
    parts = [
        tensor.by_unit(value)[torch.as_tensor(slots, device=device)].contiguous().view(torch.uint8).flatten()
        for slots in leaves
        for tensor, value in stored
    ]
    row_bytes = [_row_bytes(*pair) for pair in stored]
    incoming = [len(slots) * sum(row_bytes) for slots in comes]
    outgoing = [len(slots) * sum(row_bytes) for slots in leaves]
    received = torch.empty(sum(incoming), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, torch.cat(parts), incoming, outgoing, group=group)
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()  # so that a lost rank raises here
    arrived = []
    for slots, piece in zip(comes, received.split(incoming), strict=True):
        cut = piece.split([len(slots) * each for each in row_bytes])
        # A copy is aligned for its dtype.
        arrived.append(
            [
                bytes_.clone().view(value.dtype).view(len(slots), tensor.by_unit(value).shape[1])
                for bytes_, (tensor, value) in zip(cut, stored, strict=True)
            ]
        )
    return arrived


def _row_bytes(tensor: UnitTensor, value: Tensor) -> int:
    return tensor.by_unit(value).shape[1] * value.element_size()


def _slots(table: UnitTable, rank: int) -> Any:
    """The slot of each unit on that rank; -1 if it is not there."""
    slot = np.full(table.units, -1, dtype=np.int64)
    slot[table.slots[rank]] = np.arange(len(table.slots[rank]))
    return slot
