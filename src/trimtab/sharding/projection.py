"""The two projections of a block, with only this rank's units.

They replace an `nn.Linear` or `Conv1D` under the same name, so the module around them keeps its forward pass and
its parameters keep their names.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.sharding.group import leave
from trimtab.sharding.overlap import Multiply, linear, product
from trimtab.sharding.unit_block import UnitBlock


class HiddenReached(Exception):  # noqa: N818 - no error: ends a pass of `trimtab.sharding.verify`
    """Carries the hidden values at a block's last projection."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values


class Projection(nn.Module):
    """What both projections have in common."""

    takes_product = True
    """`trimtab.precision` may compute its product: `forward` takes it."""

    block: UnitBlock

    @property
    def copy(self) -> int:
        """The first of the ranks that hold this copy of the model: they round alike what they all compute."""
        return min(dist.get_process_group_ranks(self.block.group.process_group))


class InProjection(Projection):
    """From the replicated input to this rank's units: the rows of each unit, in slot order."""

    divided = False
    """Whether the input has only this rank's places of the sequence."""

    def __init__(
        self, block: UnitBlock, weight: nn.Parameter, bias: nn.Parameter | None, parts: tuple[int, ...]
    ):
        super().__init__()
        self.block = block
        self.weight = weight
        self.bias = bias
        self.parts = parts

    def forward(self, x: Tensor, multiply: Multiply | None = None) -> Tensor:
        width = sum(self.parts)
        x = self.block.enter(x, self.training, self)
        units = self.block.computing
        bias = None if self.bias is None else self.block.stored(self.bias, into=True)
        weight, sequence = self.block.stored(self.weight, into=True), self.block.sequence
        with nullcontext() if sequence is None else sequence.saving():
            low = _usable(self.block, multiply)
            y = linear(x, weight, bias, self.block.late, self.block.row_places, low)
        if self.block.verifying == "all units":
            return self._of_all_units(y)
        if self.block.verifying == "own units":
            y = y.detach().requires_grad_(torch.is_grad_enabled())  # what follows it is looked at
        if units == 0:
            # Attention fails without any head: give it one of zeros, which `OutProjection` drops.
            return F.pad(y, (0, width))
        if len(self.parts) > 1:
            # Stored unit by unit; attention expects all queries, then all keys, then all values.
            pieces = y.reshape(*y.shape[:-1], units, width).split(self.parts, dim=-1)
            y = torch.cat([piece.flatten(-2) for piece in pieces], dim=-1)
        return y

    def _of_all_units(self, y: Tensor) -> Tensor:
        """The output of the unsharded projection. Collective."""
        block, width = self.block, sum(self.parts)
        full = y.new_zeros((*y.shape[:-1], block.units, width))
        if block.count:
            full[..., torch.tensor(block.owned, device=y.device), :] = y.unflatten(-1, (block.count, width))
        block.group.all_reduce(full)
        return torch.cat([piece.flatten(-2) for piece in full.split(self.parts, dim=-1)], dim=-1)

    def extra_repr(self) -> str:
        return f"units={self.block.count} of {self.block.units}, parts={self.parts}"


class OutProjection(Projection):
    """From this rank's units to the sum over the units of all ranks; the bias is added once, afterwards."""

    def __init__(self, block: UnitBlock, weight: nn.Parameter, bias: nn.Parameter | None, width: int):
        super().__init__()
        self.block = block
        self.weight = weight
        self.bias = bias
        self.width = width

    def forward(self, x: Tensor, multiply: Multiply | None = None) -> Tensor:
        if self.block.verifying == "all units":
            raise HiddenReached(x)
        if self.block.computing == 0:
            x = x[..., :0]
        if self.block.verifying == "own units":
            raise HiddenReached(x)
        if self.training and self.block.activation_norms is not None:
            self.block.activation_norms.add_hidden(x)
        try:
            if self.block.running is not None:
                x = self.block.running.hidden(x)
            weight, low = self.block.stored(self.weight, into=False), _usable(self.block, multiply)
            y = product(x, weight, self.block.late, self.block.row_places, low)
            sequence = self.block.sequence
            y = leave(y, self.block.group) if sequence is None else sequence.scatter(y)
        finally:  # activation checkpointing ends a recomputed pass here by an exception
            self.block.leave()
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"units={self.block.count} of {self.block.units}, width={self.width}"


def _usable(block: UnitBlock, multiply: Multiply | None) -> Multiply | None:
    """The product in another precision; not where blocks are compared exactly, nor of nothing."""
    return multiply if block.verifying is None and block.computing else None


def by_part(stored: Tensor, parts: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The rows of each part, by unit, of a parameter that is stored unit by unit."""
    pieces: tuple[Tensor, ...] = stored.unflatten(0, (-1, sum(parts))).split(parts, dim=1)
    return pieces
