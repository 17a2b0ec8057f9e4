"""Own-migration: units change their rank for good, with their optimizer state, at a step boundary.

The steps, the same on every rank:

1. The new table of every block is checked; nothing has happened yet if it is refused.
2. The ranks compare what they were asked and what they hold (one all-gather of 32 bytes).
3. UnitBlock by block in the model's order, for those that change: one all-to-all of exactly the slices
   of the units that leave, of the parameters and of each optimizer state that is shaped like them.
4. Units that stay keep their slots; arrivals take free ones; where no room is left (or, without
   headroom, room is left over) the tensors are allocated anew under the same parameter objects.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.sharding.unit_block import ShardedModel, UnitBlock, UnitTensor, device_of, grown, sharded_model
from trimtab.sharding.unit_table import UnitTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Assignment = Mapping[str, Sequence[Sequence[int]]]
    """For each block by name, for each rank, the units it owns."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What a move did."""

    units: int
    """Units that changed their rank, over all ranks."""

    sent_bytes: int
    """What this rank sent."""

    received_bytes: int


def assignment(model: nn.Module) -> dict[str, list[list[int]]]:
    """The units of each rank, for each block: what `move` takes."""
    blocks = sharded_model(model, "assignment").blocks.values()
    return {block.name: [owned.tolist() for owned in block.table.slots] for block in blocks}


def assignment_for(model: nn.Module, counts: Mapping[str, Sequence[int]]) -> dict[str, list[list[int]]]:
    """The assignment with so many units on each rank, for each block named, that moves fewest."""
    sharded = sharded_model(model, "assignment_for")
    return {
        name: [owned.tolist() for owned in _block(sharded, name).table.with_counts(wanted).slots]
        for name, wanted in counts.items()
    }


def move(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    assignment: Assignment,
) -> Moved:
    """Give units to other ranks, exactly: the next step computes what it would have computed.

    Every rank calls it, with the same assignment, between a step and the next forward pass;
    gradients are dropped. Parameters stay the same objects, so the optimizer goes on as it is. Under
    DistributedDataParallel, sizes must not change: convert with `headroom`.

    Args:
        optimizer: the one, or all, that update the model; None if there is none.
        assignment: for each block by name the units of each rank; blocks not named stay as they are.
    """
    sharded = sharded_model(model, "move")
    sharded.check()
    optimizers = _optimizers(optimizer)
    tables = {}
    for name, lists in assignment.items():
        block = _block(sharded, name)
        wanted = UnitTable.of(name, block.units, lists, sharded.group.size)
        table = block.table.with_owners(wanted.owners())
        if not all(np.array_equal(a, b) for a, b in zip(table.slots, block.table.slots, strict=True)):
            tables[name] = table
    held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    states = {id(t.parameter): _states(t, optimizers, held) for _, t in sharded.tensors()}
    if isinstance(model, nn.parallel.DistributedDataParallel):
        _refuse_new_sizes(sharded, tables)
    _agree(sharded, tables, states)
    units = sent = received = 0
    for name, block in sharded.blocks.items():  # the model's order, whatever the mapping's
        if name in tables:
            try:
                out, into = _exchange(block, tables[name], states)
            except RuntimeError as error:
                sharded.broken = (
                    f"move: a rank was lost while units of {name} were on their way, so some are nowhere now; "
                    "end this job and resume it from its last checkpoint, which holds every unit"
                )
                raise TrimtabError(sharded.broken) from error
            units += int((tables[name].owners() != block.table.owners()).sum())
            sent, received = sent + out, received + into
            block.adopt(tables[name])
    return Moved(units=units, sent_bytes=sent, received_bytes=received)


def can_move(model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> bool:
    """Whether `move` would take these optimizers: their states can be cut by units, and none is missing."""
    optimizers = _optimizers(optimizer)
    held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    try:
        for _, tensor in sharded_model(model, "can_move").tensors():
            _states(tensor, optimizers, held)
    except TrimtabError:
        return False
    return bool(optimizers)


def _block(sharded: ShardedModel, name: str) -> UnitBlock:
    block = sharded.blocks.get(name)
    if block is None:
        raise TrimtabError(f"there is no block {name!r}; there are {', '.join(sharded.blocks)}")
    return block


def _optimizers(given: Any) -> list[torch.optim.Optimizer]:
    if given is None:
        return []
    return [given] if isinstance(given, torch.optim.Optimizer) else list(given)


def _states(
    tensor: UnitTensor, optimizers: Sequence[torch.optim.Optimizer], held: set[int]
) -> list[tuple[dict[str, Any], str]]:
    """Where the optimizer states of a parameter are that are stored by unit, as it is."""
    parameter, found = tensor.parameter, []
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {})
        for key in sorted(state):
            value = state[key]
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                found.append((state, key))
            elif isinstance(value, Tensor) and value.ndim > 0:
                raise TrimtabError(
                    f"move: {type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for {tensor.name} "
                    f"of shape {tuple(parameter.shape)}, which cannot be cut by units; use an elementwise optimizer"
                )
    if optimizers and parameter.requires_grad and id(parameter) not in held:
        raise TrimtabError(
            f"move: {tensor.name} is in none of the given optimizers; give all that update the model, "
            "so that their state moves too"
        )
    return found


def _refuse_new_sizes(sharded: ShardedModel, tables: Mapping[str, UnitTable]) -> None:
    for name, table in tables.items():
        rooms = zip(
            table.counts, sharded.blocks[name].room, sharded.blocks[name].room_for(table), strict=True
        )
        for rank, (count, before, after) in enumerate(rooms):
            if before != after:
                raise TrimtabError(
                    f"move: {name} would have {count} units on rank {rank}, which has room for {before}; "
                    "DistributedDataParallel cannot follow new sizes: convert with headroom, or move the wrapped "
                    "module and wrap it anew"
                )


def _agree(sharded: ShardedModel, tables: Mapping[str, UnitTable], states: Mapping[int, Any]) -> None:
    """Refuse on every rank when ranks were asked for different moves or hold different states."""
    if sharded.group.size == 1:
        return
    digest = hashlib.sha256()
    for name, table in sorted(tables.items()):
        digest.update(name.encode() + table.owners().tobytes())
    for _, tensor in sharded.tensors():
        kept = [(key, str(state[key].dtype)) for state, key in states[id(tensor.parameter)]]
        digest.update(repr((tensor.name, str(tensor.parameter.dtype), kept)).encode())
    device = device_of(sharded)
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).to(device)
    every = [torch.empty_like(mine) for _ in range(sharded.group.size)]
    try:
        dist.all_gather(every, mine, group=sharded.group.process_group)
    except RuntimeError as error:
        raise TrimtabError(
            "move: a rank was lost before any unit moved; resume the job from its last checkpoint"
        ) from error
    others = [rank for rank, theirs in enumerate(every) if not torch.equal(theirs, every[0])]
    if others:
        raise TrimtabError(
            f"move: rank {others[0]} was given another assignment than rank 0, or has other optimizer states; "
            "call move on every rank with the same assignment, after the same steps"
        )


@torch.no_grad()
def _exchange(
    block: UnitBlock, table: UnitTable, states: Mapping[int, list[tuple[dict[str, Any], str]]]
) -> tuple[int, int]:
    """Send what leaves, receive what comes, and put every unit into its slot."""
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
    """Give a parameter object other data, perhaps of another size."""
    if new.shape != parameter.shape:
        # A loss that is still around keeps the parameter's node of its graph, which expects gradients of the old
        # size; torch makes a new node only after a change of type.
        passing = torch.float64 if new.dtype != torch.float64 else torch.float32
        parameter.data = new.new_empty(0, dtype=passing)
    parameter.data = new


def _placed(
    tensor: UnitTensor,
    value: Tensor,
    block: UnitBlock,
    table: UnitTable,
    comes: list[Any],
    pieces: list[Tensor],
) -> Tensor:
    """The tensor after the move: in place where the room suffices, else allocated anew."""
    rank, width = block.group.rank, tensor.axis.width
    old, new = block.table.slots[rank], table.slots[rank]
    room = block.room_for(table)[rank]
    place = _slots(block.table, rank)
    common = min(len(old), len(new))
    # A slot whose unit changed to one that was here before: it came from a slot past the new end.
    shifted = np.flatnonzero((new[:common] != old[:common]) & (place[new[:common]] >= 0))
    sources = tensor.by_unit(value)[torch.as_tensor(place[new[shifted]], device=value.device)]
    stored = value if room == block.room[rank] else grown(value, room * width)
    rows = tensor.by_unit(stored)
    rows[torch.as_tensor(shifted, device=value.device)] = sources
    for slots, piece in zip(comes, pieces, strict=True):
        rows[torch.as_tensor(slots, device=value.device)] = piece
    rows[len(new) :] = 0
    return stored


def _all_to_all(
    stored: list[tuple[UnitTensor, Tensor]], leaves: list[Any], comes: list[Any], group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """Rows of the given slots to each rank; gives for each rank, for each tensor, the rows it sent."""
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
        torch.cuda.current_stream().synchronize()  # so that a lost rank is noticed here
    arrived = []
    for slots, piece in zip(comes, received.split(incoming), strict=True):
        cut = piece.split([len(slots) * each for each in row_bytes])
        # A copy starts at an address that suits its type.
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
    """For each unit its slot on that rank, -1 where it is not there."""
    slot = np.full(table.units, -1, dtype=np.int64)
    slot[table.slots[rank]] = np.arange(len(table.slots[rank]))
    return slot
