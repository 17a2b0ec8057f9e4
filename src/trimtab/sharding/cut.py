"""Leave out part of a block's products in training, without changing the shape of any collective.

There are two ways. *Units*: some units of the rank are not computed at all, which shrinks both products of a block.
*Columns*: some of the entries over which a product sums are left out, separately for the projections in and out; all
hidden units are computed. In both, forward gathers the kept slices, and backward returns gradients of full size in
which those of the slices left out are imputed:

- zero: exact for the model in which the weights left out are zero; they are frozen (`optimizer_hooks`);
- average: the mean over the kept slices;
- same: the last gradient computed for that slice. For weights only: gradients of the input belong to tokens of
  another step, so they are zero.

`trimtab.control.tensor.resizing` chooses the slices and sets the cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from trimtab.sharding.unit_block import UnitTensor

Impute = Literal["zero", "average", "same"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Slices:
    """The slices along an axis that are computed, and those that are left out."""

    kept: Tensor
    left: Tensor
    """Both are indices, on the device of the block."""

    @cached_property
    def kept_numbers(self) -> list[int]:
        """`kept` as Python integers, copied from the device once."""
        numbers: list[int] = self.kept.tolist()
        return numbers


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """What a block leaves out in training: units, or columns of the products in and out."""

    impute: Impute
    places: tuple[int, int]
    """The block's `places` when the cut was made. Places of own units come first, in slot order."""

    units: Slices | None = None
    """Places of units."""

    ins: Slices | None = None
    """Entries of the input."""

    outs: Slices | None = None
    """Entries of the hidden units, in place order."""

    last: dict[int, Tensor] = field(default_factory=dict)
    """Last computed gradient of each parameter, for "same"; passed on from one cut to the next."""

    def frozen(self, tensor: UnitTensor, value: Tensor, *, into: bool) -> tuple[Tensor, int, Tensor] | None:
        """What the optimizer must not change of a value with the parameter's shape: (view, dimension, indices)."""
        if self.impute != "zero":
            return None
        if self.units is not None:
            return tensor.by_unit(value), 0, self.units.left
        if not into:
            assert self.outs is not None
            return value, 0, self.outs.left
        assert self.ins is not None
        # Units that other ranks compute for this one are complete.
        rows = value[: self.places[0] * tensor.axis.width]
        return (rows, 1, self.ins.left) if value.ndim > 1 else None

    def weight(self, held: Tensor, parameter: int, width: int, *, into: bool) -> Tensor:
        """The part of a weight or bias to compute with; a unit has `width` of its rows."""
        if self.units is not None:
            return self._gathered(held.unflatten(0, (-1, width)), 0, self.units, parameter).flatten(0, 1)
        if not into:
            assert self.outs is not None
            return self._gathered(held, 0, self.outs, parameter)
        assert self.ins is not None
        return self._gathered(held, 1, self.ins, parameter) if held.ndim > 1 else held

    def input(self, x: Tensor) -> Tensor:
        """The part of a block's input to compute with."""
        return x if self.ins is None else self._gathered(x, x.ndim - 1, self.ins, None)

    def hidden(self, x: Tensor) -> Tensor:
        """The part of the hidden units to compute with."""
        return x if self.outs is None else self._gathered(x, x.ndim - 1, self.outs, None)

    def _gathered(self, full: Tensor, dim: int, slices: Slices, parameter: int | None) -> Tensor:
        last = None
        if self.impute == "same" and parameter is not None:
            if parameter not in self.last or self.last[parameter].shape != full.shape:
                self.last[parameter] = torch.zeros_like(full, requires_grad=False)
            last = self.last[parameter]
        average = self.impute == "average"
        gathered: Tensor = _Gather.apply(full, dim, slices.kept, slices.left, average, last)  # type: ignore[no-untyped-call]
        return gathered


class _Gather(torch.autograd.Function):
    """Forward gathers the kept slices; backward returns a gradient of full size."""

    @staticmethod
    def forward(
        ctx: Any, full: Tensor, dim: int, kept: Tensor, left: Tensor, average: bool, last: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(kept, left)
        ctx.shape, ctx.dim, ctx.average, ctx.last = full.shape, dim, average, last
        return full.index_select(dim, kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        kept, left = ctx.saved_tensors
        full = gradient.new_zeros(ctx.shape)
        full.index_copy_(ctx.dim, kept, gradient)
        if ctx.average:
            mean = gradient.mean(ctx.dim, keepdim=True)
            shape = list(ctx.shape)
            shape[ctx.dim] = len(left)
            full.index_copy_(ctx.dim, left, mean.expand(shape))
        elif ctx.last is not None:
            full.index_copy_(ctx.dim, left, ctx.last.index_select(ctx.dim, left))
            ctx.last.index_copy_(ctx.dim, kept, gradient)
        return full, None, None, None, None, None
