"""The two projections of a block, with only this rank's units.

They replace an `nn.Linear` or `Conv1D` under the same name, so the module around them keeps its forward pass and
its parameters keep their names.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.sharding.group import leave
from trimtab.sharding.overlap import linear, product
from trimtab.sharding.unit_block import UnitBlock


class HiddenReached(Exception):  # noqa: N818 - no error: ends a pass of `trimtab.sharding.verify`
    """Carries the hidden values at a block's last projection."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values


class InProjection(nn.Module):
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

    def forward(self, x: Tensor) -> Tensor:
        width = sum(self.parts)
        x = self.block.enter(x, self.training, self)
        units = self.block.computing
        bias = None if self.bias is None else self.block.stored(self.bias, into=True)
        weight, sequence = self.block.stored(self.weight, into=True), self.block.sequence
        with nullcontext() if sequence is None else sequence.saving():
            y = linear(x, weight, bias, self.block.late, self.block.row_places)
        if self.block.verifying == "all units":
            return self._of_all_units(y)
        if units == 0:
            # Attention fails without any head: give it one of zeros, which `OutProjection` drops.
            return F.pad(y, (0, width))
        if len(self.parts) > 1:
            # Stored unit by unit; attention expects all queries, then all keys, then all values.
            pieces = y.unflatten(-1, (units, width)).split(self.parts, dim=-1)
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


class OutProjection(nn.Module):
    """From this rank's units to the sum over the units of all ranks; the bias is added once, afterwards."""

    def __init__(self, block: UnitBlock, weight: nn.Parameter, bias: nn.Parameter | None, width: int):
        super().__init__()
        self.block = block
        self.weight = weight
        self.bias = bias
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        if self.block.verifying == "all units":
            raise HiddenReached(x)
        if self.block.computing == 0:
            x = x[..., :0]
        if self.block.verifying == "own units":
            raise HiddenReached(x)
        if self.training and self.block.activation_norms is not None:
            self.block.activation_norms.add_hidden(x)
        if self.block.running is not None:
            x = self.block.running.hidden(x)
        y = product(x, self.block.stored(self.weight, into=False), self.block.late, self.block.row_places)
        sequence = self.block.sequence
        y = leave(y, self.block.group) if sequence is None else sequence.scatter(y)
        self.block.leave()
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"units={self.block.count} of {self.block.units}, width={self.width}"


def by_part(stored: Tensor, parts: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The rows of each part, by unit, of a parameter that is stored unit by unit."""
    pieces: tuple[Tensor, ...] = stored.unflatten(0, (-1, sum(parts))).split(parts, dim=1)
    return pieces
