"""A block of units spread over the ranks, and all blocks of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.model_state import attach_state, find_state
from trimtab.sharding.group import TensorGroup, enter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trimtab.sharding.cut import Cut
    from trimtab.sharding.lease import BlockLease, Leases
    from trimtab.sharding.slice_scores import ActivationNorms
    from trimtab.sharding.unit_axis import UnitAxis
    from trimtab.sharding.unit_table import UnitTable


@dataclass(kw_only=True)
class UnitTensor:
    """A parameter that is stored by unit: this rank's slices, and room for more where there is headroom."""

    name: str
    """Its name in the model, the same as on a single device."""

    module: nn.Module
    attribute: str
    axis: UnitAxis
    full_shape: tuple[int, ...]
    """Its shape on a single device."""

    @property
    def parameter(self) -> nn.Parameter:
        parameter = getattr(self.module, self.attribute)
        assert isinstance(parameter, nn.Parameter)
        return parameter

    def by_unit(self, stored: Tensor) -> Tensor:
        """A tensor shaped like the parameter, seen as (slots, everything of one unit)."""
        return stored.view(stored.shape[0] // self.axis.width, -1)


@dataclass(kw_only=True, eq=False)
class UnitBlock:
    """Units that add up to one output: an MLP's hidden units, an attention's heads."""

    name: str
    units: int
    heads_per_unit: int
    """Heads that travel together (those of one key and value); 0 for an MLP."""

    parent: nn.Module
    """The module whose forward pass this is."""

    local_widths: dict[str, int]
    """Attributes of the parent that hold the width of its heads, and what one unit adds to each."""

    group: TensorGroup
    sharded: ShardedModel
    table: UnitTable
    room: tuple[int, ...]
    """For how many units each rank has room."""

    tensors: list[UnitTensor] = field(default_factory=list)
    draws: bool = False
    """Whether its attention weights are dropped out in training."""

    calls: int = 0
    """Forward passes of the training so far that drew random numbers."""

    lease: BlockLease | None = None
    """The units that ranks compute for each other in training; None while each computes its own."""

    cut: Cut | None = None
    """What this rank leaves out of the passes of training; evaluation is always in full."""

    running: Cut | None = None
    """What the pass under way leaves out."""

    learned: Cut | None = None
    """What the last pass of training left out: what its gradients are about."""

    activation_norms: ActivationNorms | None = None
    """Adds up the sizes of activations while something wants to know."""
    _entered: tuple[Tensor, Tensor] | None = None

    @property
    def owned(self) -> list[int]:
        """This rank's units, by slot."""
        return [int(unit) for unit in self.table.slots[self.group.rank]]

    @property
    def count(self) -> int:
        """How many units this rank owns."""
        return len(self.table.slots[self.group.rank])

    @property
    def computed(self) -> list[int]:
        """The units that this rank computes in this pass, in their order: its own, but for a lease or a cut."""
        held = self.owned if self.lease is None or not self.lease.working else self.lease.units
        if self.running is None or self.running.units is None:
            return held
        return [held[place] for place in self.running.units.kept_numbers]

    @property
    def computing(self) -> int:
        """How many they are."""
        if self.running is not None and self.running.units is not None:
            return len(self.running.units.kept)
        return self.count if self.lease is None or not self.lease.working else len(self.lease.units)

    @property
    def places(self) -> tuple[int, int]:
        """How many units of its own this rank computes in training but for a cut, and how many with borrowed ones."""
        return (self.count, self.count) if self.lease is None else (self.lease.kept, len(self.lease.units))

    def stored(self, parameter: Tensor, *, into: bool) -> Tensor:
        """The part of a parameter that this rank computes with in this pass; `into` the units, or out of them."""
        width = parameter.shape[0] // self.room[self.group.rank]
        if self.lease is not None and self.lease.working:
            held = self.lease.working[id(parameter)]
        else:
            rows = self.count * width
            held = parameter if parameter.shape[0] == rows else parameter[:rows]
        return held if self.running is None else self.running.weight(held, id(parameter), width, into=into)

    def enter(self, x: Tensor, training: bool) -> Tensor:
        """The block's input; projections of the same input share it, so its gradients meet once."""
        if self._entered is None or self._entered[0] is not x:
            self.sharded.inside = self
            self._forget_pass()  # a repeated pass may have ended before its output
            if self.lease is not None and training and torch.is_grad_enabled():
                entered = self.lease.enter(x)
            else:
                entered = enter(x, self.group)
            if training:
                if self.cut is not None and self.cut.places != self.places:
                    self.changed()  # the lease is another than the cut was made for
                self.running = self.learned = self.cut
                if self.activation_norms is not None:
                    self.activation_norms.see_input(x)
            if self.running is not None:
                entered = self.running.input(entered)
            self._entered = (x, entered)
            self._set_widths(self.computing)
        return self._entered[1]

    def left(self) -> None:
        """The block's output is complete."""
        self._entered = None
        self.sharded.inside = None
        self._forget_pass()

    def _forget_pass(self) -> None:
        if self.lease is not None and self.lease.working:
            self.lease.working = {}
        self.running = None
        self._set_widths(self.count)

    def changed(self) -> None:
        """Other units are computed here than before: what was to be left out must be chosen anew."""
        self.cut = self.learned = self.running = None
        for listener in self.sharded.listeners:
            listener(self)

    def room_for(self, table: UnitTable) -> tuple[int, ...]:
        """The room each rank has with another table: what it had, if there is headroom and it suffices."""
        return tuple(
            room if self.sharded.headroom > 0 and count <= room else self.sharded.capacity(count)
            for room, count in zip(self.room, table.counts, strict=True)
        )

    def adopt(self, table: UnitTable) -> None:
        """Take over a table; the tensors hold its units already."""
        self.table, self.room, self.lease = table, self.room_for(table), None
        self._set_widths(self.count)
        self.changed()

    def _set_widths(self, units: int) -> None:
        for attribute, width in self.local_widths.items():
            setattr(self.parent, attribute, max(1, units) * width)


@dataclass(kw_only=True, eq=False)
class ShardedModel:
    """The blocks of a model that was converted, in the order of its modules."""

    group: TensorGroup
    seed: int
    replica: int
    """Which of the data-parallel copies of the model this is, for its random numbers."""

    headroom: float
    blocks: dict[str, UnitBlock] = field(default_factory=dict)
    inside: UnitBlock | None = None
    """The block whose units are being computed now."""

    leases: Leases | None = None
    """Gradients of leased units on their way; None before the first lease."""

    listeners: list[Callable[[UnitBlock], None]] = field(default_factory=list)
    """Called with each block that computes other units than before."""

    broken: str = ""
    """Why the units cannot be trusted any more; empty while they can."""

    def tensors(self) -> Iterator[tuple[UnitBlock, UnitTensor]]:
        for block in self.blocks.values():
            for tensor in block.tensors:
                yield block, tensor

    def capacity(self, count: int) -> int:
        """Slots to allocate for so many units: at least one, since optimizers and DDP dislike empty tensors."""
        return max(1, math.ceil(count * (1 + self.headroom)))

    def check(self) -> None:
        if self.broken:
            raise TrimtabError(self.broken)


def attach(model: nn.Module, sharded: ShardedModel) -> None:
    attach_state(model).tensor_parallel = sharded


def find_sharded_model(model: nn.Module) -> ShardedModel | None:
    """The blocks of a converted model, also inside DistributedDataParallel; None if it was not converted."""
    sharded: ShardedModel | None = find_state(model, "tensor_parallel")
    return sharded


def sharded_model(model: nn.Module, verb: str) -> ShardedModel:
    """As `find_sharded_model`, for a verb that needs it."""
    sharded = find_sharded_model(model)
    if sharded is None:
        raise TrimtabError(
            f"{verb}: this {type(model).__name__} is not tensor-parallel; "
            "convert it first: trimtab.tensor_parallel(model, mesh)"
        )
    return sharded


def grown(stored: Tensor, rows: int) -> Tensor:
    """A copy with so many rows: the first ones as they were, new ones zero."""
    new = stored.new_zeros((rows, *stored.shape[1:]))
    kept = min(rows, stored.shape[0])
    new[:kept] = stored[:kept]
    return new


def device_of(sharded: ShardedModel) -> torch.device:
    return next(sharded.tensors())[1].parameter.device
