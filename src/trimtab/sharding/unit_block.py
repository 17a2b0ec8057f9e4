"""A block of units, sharded over the ranks, and all blocks of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from trimtab.errors import TrimtabError
from trimtab.model_state import find_state
from trimtab.sharding.dropout.passes import Passes
from trimtab.sharding.group import TensorGroup, enter
from trimtab.sharding.overlap import AllReduced, Holding, Late, Way, enter_block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trimtab.sharding.cut import Cut
    from trimtab.sharding.lease import BlockLease, Leases
    from trimtab.sharding.sequence.exchange import Sequence as TokenSequence
    from trimtab.sharding.slice_scores import ActivationNorms
    from trimtab.sharding.unit_axis import UnitAxis
    from trimtab.sharding.unit_table import UnitTable


@dataclass(kw_only=True)
class UnitTensor:
    """A parameter stored by unit: the slices of this rank's units, and empty slots if there is headroom."""

    name: str
    """Name of the parameter in the model, the same as on a single device."""

    module: nn.Module
    attribute: str
    into: bool
    """Whether it belongs to a projection into the units; False for the one out of them."""

    axis: UnitAxis
    full_shape: tuple[int, ...]
    """Shape on a single device."""

    aliases: tuple[str, ...] = ()
    """Further names of the same parameter in the model."""

    multiplied: bool = True
    """Whether it is a factor of matrix products; False for a matrix of which only rows are looked up."""

    @property
    def parameter(self) -> nn.Parameter:
        parameter = getattr(self.module, self.attribute)
        assert isinstance(parameter, nn.Parameter)
        return parameter

    def by_unit(self, stored: Tensor) -> Tensor:
        """A tensor with the shape of the parameter, viewed as (slots, values of one unit)."""
        return stored.view(stored.shape[0] // self.axis.width, -1)


@dataclass(kw_only=True, eq=False)
class UnitBlock:
    """Units whose outputs are summed: the hidden units of an MLP, the heads of an attention."""

    name: str
    units: int
    heads_per_unit: int
    """Heads in one unit (those that share a key and value head); 0 for an MLP."""

    parent: nn.Module
    """The module that computes the block in its forward pass."""

    local_widths: list[tuple[Any, str, int]]
    """Attributes that hold the width or the number of all heads, in the parent and its modules, with that of a unit."""

    group: TensorGroup
    sharded: ShardedModel
    table: UnitTable
    capacity: tuple[int, ...]
    """Number of slots on each rank."""

    vocabulary: bool = False
    """Whether the units are the entries of a vocabulary, which can move, but not be leased or left out."""

    sequence: TokenSequence | None = None
    """How its output is divided along the sequence; None if all of it is on every rank."""

    tensors: list[UnitTensor] = field(default_factory=list)
    draws: bool = False
    """Whether training applies dropout to its attention weights."""

    passes: Passes = field(default_factory=Passes)
    """Training passes so far that drew random numbers."""

    lease: BlockLease | None = None
    """Units that ranks compute for each other in training; None while each rank computes its own."""

    cut: Cut | None = None
    """The slices that this rank leaves out in training; evaluation always computes everything."""

    running: Cut | None = None
    """The cut of the current pass."""

    learned: Cut | None = None
    """The cut of the last training pass, to which the gradients belong."""

    activation_norms: ActivationNorms | None = None
    """Accumulates the norms of activations while they are needed."""
    verifying: Literal["own units", "all units"] | None = None
    """What a pass of `trimtab.sharding.verify` computes; None in every other pass."""
    leasing: bool = False
    """Whether the current pass computes the units of the lease."""

    late: Late | None = None
    """Weights' gradients of the current pass that are computed late; None if it has none."""

    row_places: dict[int, int] = field(default_factory=dict)
    """Index of each tensor of the block, by the id of its rows in the current pass."""

    _rows: dict[int, Tensor] = field(default_factory=dict)
    """The rows to compute with in the current pass, by id of the parameter; empty where they are its first ones."""

    _entered: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Inputs of the current pass, each as it came and as it is computed with."""

    _called: set[int | str] = field(default_factory=set)
    """Projections that were called in the current pass."""

    @property
    def owned(self) -> list[int]:
        """The units of this rank, by slot."""
        return [int(unit) for unit in self.table.slots[self.group.rank]]

    @property
    def count(self) -> int:
        """Number of units that this rank owns."""
        return len(self.table.slots[self.group.rank])

    @property
    def computed(self) -> list[int]:
        """The units that this rank computes in this pass, in order: its own, unless there is a lease or a cut."""
        held = self.owned if self.lease is None or not self.leasing else self.lease.units
        if self.running is None or self.running.units is None:
            return held
        return [held[place] for place in self.running.units.kept_numbers]

    @property
    def computing(self) -> int:
        """Number of `computed` units."""
        if self.running is not None and self.running.units is not None:
            return len(self.running.units.kept)
        return self.count if self.lease is None or not self.leasing else len(self.lease.units)

    @property
    def places(self) -> tuple[int, int]:
        """Number of own units that this rank computes in training, and of own and borrowed ones, both before a cut."""
        return (self.count, self.count) if self.lease is None else (self.lease.kept, len(self.lease.units))

    def stored(self, parameter: Tensor, *, into: bool) -> Tensor:
        """The part of a projection's parameter (`into` the units, or out of them) to compute with in this pass."""
        width = parameter.shape[0] // self.capacity[self.group.rank]
        held = self._rows.get(id(parameter))
        if held is None:
            rows = self.count * width
            held = parameter if parameter.shape[0] == rows else parameter[:rows]
        return held if self.running is None else self.running.weight(held, id(parameter), width, into=into)

    def enter(self, x: Tensor, training: bool, projection: object) -> Tensor:
        """The block's input. Projections of the same input share it, so that its gradient is all-reduced once.

        A pass may have several inputs (cross-attention). It ends with `leave`, or when a projection is called again
        with another input: a recomputed pass may have stopped before its output.
        """
        key = projection if isinstance(projection, (int, str)) else id(projection)
        entered = next((entered for known, entered in self._entered if known is x), None)
        if entered is not None:
            self._called.add(key)
            return entered
        if self._entered and key not in self._called:
            entered = self._on_all_places(x, projection)
            entered = enter(x, self.group) if entered is None else entered
            if self.running is not None:
                entered = self.running.input(entered)
        else:
            self.sharded.inside = self
            self._entered, self._called = [], set()
            self._end_pass()
            gathered = self._on_all_places(x, projection)
            if self._enters_with_rows(training):
                entered = self._enter_with_rows(x, gathered, training)
            else:
                entered = enter(x, self.group) if gathered is None else gathered
            if training:
                if self.cut is not None and self.cut.places != self.places:
                    self.changed()  # the lease has changed since the cut was made
                self.running = self.learned = self.cut
                if self.activation_norms is not None:
                    self.activation_norms.add_input(x)
            if self.running is not None:
                entered = self.running.input(entered)
            self.set_widths(self.units if self.verifying == "all units" else self.computing)
        self._entered.append((x, entered))
        self._called.add(key)
        return entered

    def _enters_with_rows(self, training: bool) -> bool:
        """Whether the parameters pass through the entrance of the block, as leases and overlap need."""
        if not torch.is_grad_enabled():
            return False
        if self.lease is not None and training:
            return True
        # A compiled graph orders collectives and products by itself.
        return not torch.compiler.is_compiling() and (self.group.size > 1 or self.group.clock is not None)

    @_disable_dynamo  # unlike torch.compiler.disable, imports the compiler only when called
    def _enter_with_rows(self, x: Tensor, gathered: Tensor | None, training: bool) -> Tensor:
        way: Way = AllReduced(self.group)
        value = x
        if gathered is not None:
            assert self.sequence is not None
            value, (x, way) = gathered, self.sequence.way_of(gathered)
        parameters = [tensor.parameter for tensor in self.tensors]
        holding: Holding = _Own(self)
        if self.lease is not None and training:
            self.lease.fetch()
            self.leasing, holding = True, self.lease
        entered, rows, self.late = enter_block(
            x, value, parameters, group=self.group, way=way, holding=holding
        )
        self._rows = {id(parameter): each for parameter, each in zip(parameters, rows, strict=True)}
        self.row_places = {id(each): index for index, each in enumerate(rows)}
        return entered

    def _on_all_places(self, x: Tensor, projection: object) -> Tensor | None:
        """An input that is divided along the sequence, gathered; its gradient is summed there. None for any other."""
        if self.sequence is None:
            return None
        if any(x is full for full in self.sequence.gathered):
            return x
        return self.sequence.gather(x) if getattr(projection, "divided", False) else None

    def leave(self) -> None:
        """End the pass: the block's output is complete."""
        self._entered, self._called = [], set()
        self.sharded.inside = None
        self._end_pass()

    def _end_pass(self) -> None:
        self.leasing, self.late, self._rows, self.row_places = False, None, {}, {}
        self.running = None
        self.set_widths(self.count)

    def changed(self) -> None:
        """The units computed here have changed: the cut is dropped, and listeners may choose a new one."""
        self.cut = self.learned = self.running = None
        for listener in self.sharded.listeners:
            listener(self)

    def capacity_for(self, table: UnitTable) -> tuple[int, ...]:
        """Slots on each rank with another table: as many as now, if there is headroom and they suffice."""
        return tuple(
            slots if self.sharded.headroom > 0 and count <= slots else self.sharded.slots_for(count)
            for slots, count in zip(self.capacity, table.counts, strict=True)
        )

    def adopt(self, table: UnitTable) -> None:
        """Replace the table; the tensors already hold its units."""
        self.table, self.capacity, self.lease = table, self.capacity_for(table), None
        self.set_widths(self.count)
        self.changed()

    def set_widths(self, units: int) -> None:
        """Let the forward pass expect that many units."""
        for module, attribute, width in self.local_widths:
            setattr(module, attribute, max(1, units) * width)


class _Own:
    """A pass with this rank's own units."""

    def __init__(self, block: UnitBlock) -> None:
        self._counts = [block.count * tensor.axis.width for tensor in block.tensors]

    def rows(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [parameter[:count] for parameter, count in zip(parameters, self._counts, strict=True)]

    def gradients(
        self, gradients: Sequence[Tensor | None], parameters: Sequence[tuple[torch.Size, torch.dtype]]
    ) -> list[Tensor | None]:
        own: list[Tensor | None] = []
        for gradient, (shape, dtype) in zip(gradients, parameters, strict=True):
            if gradient is not None and gradient.shape != shape:
                gradient = grown(gradient, shape[0])
            own.append(None if gradient is None else gradient.to(dtype))
        return own


class Replicas(Protocol):
    """Data-parallel replicas of the model that may divide the units differently."""

    @property
    def first(self) -> bool:
        """Whether this is the replica that writes the units to checkpoints."""

    def share_tables(self) -> None:
        """Tell the other replicas who owns what, if that has changed in any. Every rank of every replica calls it."""

    def agree(self, value: Tensor) -> None:
        """Replace a value by that of the first replica. Every rank of every replica calls it."""


@dataclass(kw_only=True, eq=False)
class ShardedModel:
    """The blocks of a converted model, in the order of its modules."""

    group: TensorGroup
    seed: int
    replica: int
    """Index of this data-parallel replica of the model, for its random numbers."""

    headroom: float
    replicas: Replicas | None = None
    """The other replicas, if they may divide the units differently; None if all divide them alike."""

    blocks: dict[str, UnitBlock] = field(default_factory=dict)
    inside: UnitBlock | None = None
    """The block that is being computed."""

    sequence: TokenSequence | None = None
    """How activations are divided along the sequence; None if they are not."""

    leases: Leases | None = None
    """Gradients of leased units in flight; None before the first lease."""

    listeners: list[Callable[[UnitBlock], None]] = field(default_factory=list)
    """Called with each block whose computed units have changed."""

    replicated: dict[str, str] = field(default_factory=dict)
    """Why a linear map of a repeated layer is whole on every rank, by its name."""

    broken: str = ""
    """Why the units are no longer valid; empty while they are."""

    def tensors(self) -> Iterator[tuple[UnitBlock, UnitTensor]]:
        for block in self.blocks.values():
            for tensor in block.tensors:
                yield block, tensor

    def slots_for(self, count: int) -> int:
        """Slots to allocate for that many units: at least one, since DDP does not support empty tensors."""
        return max(1, math.ceil(count * (1 + self.headroom)))

    def check(self) -> None:
        if self.broken:
            raise TrimtabError(self.broken)

    def block(self, name: str, verb: str) -> UnitBlock:
        if name not in self.blocks:
            raise TrimtabError(f"{verb}: there is no block {name!r}; the model has {', '.join(self.blocks)}")
        return self.blocks[name]

    @property
    def device(self) -> torch.device:
        return next(self.tensors())[1].parameter.device


def find_sharded_model(model: nn.Module) -> ShardedModel | None:
    """The blocks of a converted model, also of one inside DistributedDataParallel; None if it is not converted."""
    sharded: ShardedModel | None = find_state(model, "tensor_parallel")
    return sharded


def sharded_model(model: nn.Module, verb: str) -> ShardedModel:
    """As `find_sharded_model`; raises in the name of `verb` if the model is not converted."""
    sharded = find_sharded_model(model)
    if sharded is None:
        raise TrimtabError(
            f"{verb}: this {type(model).__name__} is not tensor-parallel; "
            "convert it first: trimtab.tensor_parallel(model, mesh)"
        )
    return sharded


def grown(stored: Tensor, rows: int) -> Tensor:
    """A copy with that many rows: the first ones unchanged, new ones zero."""
    new = stored.new_zeros((rows, *stored.shape[1:]))
    kept = min(rows, stored.shape[0])
    new[:kept] = stored[:kept]
    return new
