"""A block of units spread over the ranks, and all blocks of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.tensor_parallel.group import TensorGroup, enter

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from trimtab.tensor_parallel.layout import UnitAxis
    from trimtab.tensor_parallel.table import Table

_ATTRIBUTE = "_trimtab_tensor_parallel"


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
class Block:
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
    elastic: Elastic
    table: Table
    room: tuple[int, ...]
    """For how many units each rank has room."""

    tensors: list[UnitTensor] = field(default_factory=list)
    draws: bool = False
    """Whether its attention weights are dropped out in training."""

    calls: int = 0
    """Forward passes of the training so far that drew random numbers."""
    _entered: tuple[Tensor, Tensor] | None = None

    @property
    def owned(self) -> list[int]:
        """This rank's units, by slot."""
        return [int(unit) for unit in self.table.slots[self.group.rank]]

    @property
    def count(self) -> int:
        """How many units this rank owns."""
        return len(self.table.slots[self.group.rank])

    def enter(self, x: Tensor) -> Tensor:
        """The block's input; projections of the same input share it, so its gradients meet once."""
        if self._entered is None or self._entered[0] is not x:
            self._entered = (x, enter(x, self.group))
            self.elastic.inside = self
        return self._entered[1]

    def left(self) -> None:
        """The block's output is complete."""
        self._entered = None
        self.elastic.inside = None

    def room_for(self, table: Table) -> tuple[int, ...]:
        """The room each rank has with another table: what it had, if there is headroom and it suffices."""
        return tuple(
            room if self.elastic.headroom > 0 and count <= room else self.elastic.capacity(count)
            for room, count in zip(self.room, table.counts, strict=True)
        )

    def adopt(self, table: Table) -> None:
        """Take over a table; the tensors hold its units already."""
        self.table, self.room = table, self.room_for(table)
        for attribute, width in self.local_widths.items():
            setattr(self.parent, attribute, max(1, self.count) * width)


@dataclass(kw_only=True, eq=False)
class Elastic:
    """The blocks of a model that was converted, in the order of its modules."""

    group: TensorGroup
    seed: int
    replica: int
    """Which of the data-parallel copies of the model this is, for its random numbers."""

    headroom: float
    blocks: dict[str, Block] = field(default_factory=dict)
    inside: Block | None = None
    """The block whose units are being computed now."""

    broken: str = ""
    """Why the units cannot be trusted any more; empty while they can."""

    def tensors(self) -> Iterator[tuple[Block, UnitTensor]]:
        for block in self.blocks.values():
            for tensor in block.tensors:
                yield block, tensor

    def capacity(self, count: int) -> int:
        """Slots to allocate for so many units: at least one, since optimisers and DDP dislike empty tensors."""
        return max(1, math.ceil(count * (1 + self.headroom)))

    def check(self) -> None:
        if self.broken:
            raise TrimtabError(self.broken)


def attach(model: nn.Module, elastic: Elastic) -> None:
    model.__dict__[_ATTRIBUTE] = elastic


def find_elastic(model: nn.Module) -> Elastic | None:
    """The blocks of a converted model, also inside DistributedDataParallel; None if it was not converted."""
    for candidate in (model, getattr(model, "module", None)):
        if isinstance(candidate, nn.Module) and isinstance(candidate.__dict__.get(_ATTRIBUTE), Elastic):
            return candidate.__dict__[_ATTRIBUTE]  # type: ignore[no-any-return]
    return None


def elastic_of(model: nn.Module, verb: str) -> Elastic:
    """As `find_elastic`, for a verb that needs it."""
    elastic = find_elastic(model)
    if elastic is None:
        raise TrimtabError(
            f"{verb}: this {type(model).__name__} is not tensor-parallel; "
            "convert it first: trimtab.tensor_parallel(model, mesh)"
        )
    return elastic


def grown(stored: Tensor, rows: int) -> Tensor:
    """A copy with so many rows: the first ones as they were, new ones zero."""
    new = stored.new_zeros((rows, *stored.shape[1:]))
    kept = min(rows, stored.shape[0])
    new[:kept] = stored[:kept]
    return new


def device_of(elastic: Elastic) -> torch.device:
    return next(elastic.tensors())[1].parameter.device
