"""Leaving part of a block's products out, so that every collective keeps its shape.

Two forms. *Units*: some of the rank's units are not computed at all, so both products of a block shrink by
their part. *Columns*: the entries over which a product sums are cut, for the projections in and out each by itself;
the hidden units are all there. Either way only gathering differs from the ordinary pass: forward takes the kept slices,
backward gives gradients of full size and fills in (imputes) those of the slices left out:

- zero: exact for the model in which the weights left out are zero; they are frozen (`optimizer_hooks`);
- average: the mean over the kept slices;
- same: what was computed for that slice last. Only for weights: gradients of the input belong to tokens that
  are gone by then, so those are zero.

The verbs (`set_resize`, `clear_resize`, `resized`, `watch_resize`) are in `trimtab.control.tensor.resizing`, because
choosing is a plan's work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trimtab.sharding.unit_block import UnitTensor

Impute = Literal["zero", "average", "same"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Slices:
    """Which slices along an axis are computed and which are left out."""

    kept: Tensor
    left: Tensor
    """Both whole numbers, on the device of the block."""

    @cached_property
    def kept_numbers(self) -> list[int]:
        """What is kept, as Python numbers: fetched from the device once."""
        numbers: list[int] = self.kept.tolist()
        return numbers


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """What a block leaves out in training: whole units, or columns of the products in and out."""

    impute: Impute
    places: tuple[int, int]
    """The block's `places` that it was made for: those of own units come first, in the order of slots."""

    units: Slices | None = None
    """Places of units."""

    ins: Slices | None = None
    """Entries of the input."""

    outs: Slices | None = None
    """Entries of the hidden units, in the order of places."""

    last: dict[int, Tensor] = field(default_factory=dict)
    """Last computed gradients by parameter, for imputing the same; handed on from one cut to the next."""

    def frozen(self, tensor: UnitTensor, value: Tensor, *, into: bool) -> tuple[Tensor, int, Tensor] | None:
        """What the optimizer must not touch of a value shaped like the parameter: (view of it, dimension, indices)."""
        if self.impute != "zero":
            return None
        if self.units is not None:
            return tensor.by_unit(value), 0, self.units.left
        if not into:
            assert self.outs is not None
            return value, 0, self.outs.left
        assert self.ins is not None
        # What others compute for this rank is whole.
        rows = value[: self.places[0] * tensor.axis.width]
        return (rows, 1, self.ins.left) if value.ndim > 1 else None

    def weight(self, held: Tensor, parameter: int, width: int, *, into: bool) -> Tensor:
        """The part of a weight or bias that takes part, of which a unit has `width` rows."""
        if self.units is not None:
            return self._gathered(held.unflatten(0, (-1, width)), 0, self.units, parameter).flatten(0, 1)
        if not into:
            assert self.outs is not None
            return self._gathered(held, 0, self.outs, parameter)
        assert self.ins is not None
        return self._gathered(held, 1, self.ins, parameter) if held.ndim > 1 else held

    def input(self, x: Tensor) -> Tensor:
        """The part of a block's input that is multiplied."""
        return x if self.ins is None else self._gathered(x, x.ndim - 1, self.ins, None)

    def hidden(self, x: Tensor) -> Tensor:
        """The part of the hidden units that is multiplied."""
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
    """Forward the kept slices; backward a gradient of full size."""

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
