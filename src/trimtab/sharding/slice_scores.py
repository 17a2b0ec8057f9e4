"""How much units and columns change and how large their activations are: what choosing among them needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.sharding.projection import InProjection

if TYPE_CHECKING:
    from trimtab.sharding.unit_block import UnitBlock


@dataclass(frozen=True, kw_only=True)
class SliceScores:
    """A number for every slice of a block on this rank, by each way to cut it."""

    units: Tensor
    """By slot."""

    ins: Tensor
    """By entry of the input."""

    outs: Tensor
    """By entry of the hidden units, in the order of slots."""


class WeightChanges:
    """How far a block's parameters have moved since it was told to look."""

    def __init__(self, block: UnitBlock) -> None:
        self._block = block
        self._then: list[Tensor] = []
        self.look()

    @torch.no_grad()
    def look(self) -> None:
        """Count from here on."""
        now = [tensor.parameter.detach() for tensor in self._block.tensors]
        if [value.shape for value in now] == [value.shape for value in self._then]:
            torch._foreach_copy_(self._then, now)
        else:
            self._then = [value.clone() for value in now]

    @torch.no_grad()
    def since(self) -> SliceScores:
        """Sums of |now - then| since the last look; the next thing to ask for is another look."""
        count = self._block.count
        device = self._then[0].device
        units, ins, outs = (torch.zeros(1, device=device) for _ in range(3))
        for tensor, then in zip(self._block.tensors, self._then, strict=True):
            # In place: a new tensor as large as the parameter would take longer than all the rest.
            moved = torch.sub(tensor.parameter.detach(), then, out=then).abs_()
            if isinstance(tensor.module, InProjection):
                units = units + tensor.by_unit(moved).sum(1, dtype=torch.float32)[:count]
                ins = ins + moved.sum(0, dtype=torch.float32) if tensor.attribute == "weight" else ins
            else:
                outs = moved.sum(1, dtype=torch.float32)[: count * tensor.axis.width]
                units = units + outs.view(-1, tensor.axis.width).sum(1)
        return SliceScores(units=units, ins=ins, outs=outs)


class ActivationNorms:
    """Adds up the squares of a block's activations, forward pass by forward pass, while the cut stays the same."""

    def __init__(self, block: UnitBlock) -> None:
        self._block = block
        self._input: Tensor | None = None
        self._hidden: Tensor | None = None

    def see_input(self, x: Tensor) -> None:
        self._input = _added(self._input, x)

    def see_hidden(self, x: Tensor) -> None:
        self._hidden = _added(self._hidden, x)

    @torch.no_grad()
    def bounds(self) -> SliceScores | None:
        """‖X_c‖‖W_c‖ for each column c, NaN where it was not computed; None if nothing was seen.

        The sum over the columns left out bounds the error of a product, by the triangle inequality.
        """
        block = self._block
        if self._input is None or self._hidden is None:
            return None
        squares = torch.zeros_like(self._input)
        outs = torch.zeros(0)
        for tensor in block.tensors:
            weight = tensor.parameter.detach().float()
            if tensor.attribute == "weight" and isinstance(tensor.module, InProjection):
                squares += weight.square().sum(0)
            elif tensor.attribute == "weight":
                outs = weight.norm(dim=1).view(-1, tensor.axis.width)[: block.count]
        width = outs.shape[1]
        norms = torch.full_like(outs, math.nan)
        own = block.places[0]
        if block.learned is not None and block.learned.units is not None:
            kept = block.learned.units.kept
            kept = kept[kept < own]
        else:
            kept = torch.arange(own, device=outs.device)
        norms[kept] = self._hidden.view(-1, width)[: len(kept)].sqrt()
        outs = outs * norms
        return SliceScores(units=outs.sum(1), ins=(self._input * squares).sqrt(), outs=outs.flatten())


def _added(total: Tensor | None, x: Tensor) -> Tensor:
    squares = x.detach().float().square().flatten(0, -2).sum(0)
    return squares if total is None else total + squares
