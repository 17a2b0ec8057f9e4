"""Scores by which the slices to leave out are chosen: how much weights change, and how large activations are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.sharding.unit_block import UnitBlock


@dataclass(frozen=True, kw_only=True)
class SliceScores:
    """A score for every slice of a block on this rank, for each axis along which it can be cut."""

    units: Tensor
    """For each slot."""

    ins: Tensor
    """For each entry of the input."""

    outs: Tensor
    """For each entry of the hidden units, in slot order."""


class WeightChanges:
    """How much a block's parameters have changed since the last `snapshot`."""

    def __init__(self, block: UnitBlock) -> None:
        self._block = block
        self._snapshot: list[Tensor] = []
        self.snapshot()

    @torch.no_grad()
    def snapshot(self) -> None:
        """Measure changes from now on."""
        now = [tensor.parameter.detach() for tensor in self._block.tensors]
        if [value.shape for value in now] == [value.shape for value in self._snapshot]:
            torch._foreach_copy_(self._snapshot, now)
        else:
            self._snapshot = [value.clone() for value in now]

    @torch.no_grad()
    def since(self) -> SliceScores:
        """Sums of |change| since the last snapshot, which this overwrites: take another one next."""
        count = self._block.count
        device = self._snapshot[0].device
        units, ins, outs = (torch.zeros(1, device=device) for _ in range(3))
        for tensor, before in zip(self._block.tensors, self._snapshot, strict=True):
            # In place: allocating a tensor as large as the parameter would take longer than everything else here.
            change = torch.sub(tensor.parameter.detach(), before, out=before).abs_()
            if tensor.into:
                units = units + tensor.by_unit(change).sum(1, dtype=torch.float32)[:count]
                ins = ins + change.sum(0, dtype=torch.float32) if change.ndim > 1 else ins
            else:
                outs = change.sum(1, dtype=torch.float32)[: count * tensor.axis.width]
                units = units + outs.view(-1, tensor.axis.width).sum(1)
        return SliceScores(units=units, ins=ins, outs=outs)


class ActivationNorms:
    """Sums of squares of a block's activations over forward passes with the same cut."""

    def __init__(self, block: UnitBlock) -> None:
        self._block = block
        self._input: Tensor | None = None
        self._hidden: Tensor | None = None

    def add_input(self, x: Tensor) -> None:
        self._input = _add_squares(self._input, x)

    def add_hidden(self, x: Tensor) -> None:
        self._hidden = _add_squares(self._hidden, x)

    @torch.no_grad()
    def bounds(self) -> SliceScores | None:
        """‖X_c‖‖W_c‖ for each column c, NaN for columns that were not computed; None without any forward pass.

        By the triangle inequality, the sum over the columns left out bounds the error of a product.
        """
        block = self._block
        if self._input is None or self._hidden is None:
            return None
        squares = torch.zeros_like(self._input)
        outs = torch.zeros(0)
        for tensor in block.tensors:
            weight = tensor.parameter.detach().float()
            if weight.ndim > 1 and tensor.into:
                squares += weight.square().sum(0)
            elif not tensor.into:
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


def _add_squares(total: Tensor | None, x: Tensor) -> Tensor:
    squares = x.detach().float().square().flatten(0, -2).sum(0)
    return squares if total is None else total + squares
