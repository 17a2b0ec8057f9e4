"""The entrance of a block, whose backward pass overlaps a collective with products.

In the backward pass of a block the gradient of its input is summed over the ranks. The gradients of its weights need no
other rank, so they are computed while that sum is under way:

1. Backward through the block's projections (`linear`, `product`): only the gradient of their input is computed; what
   the weight's needs is put aside (`Late`).
2. `_Entrance.backward`, once the gradient of the block's input is complete: start its all-reduce (reduce-scatter where
   the sequence is divided), compute the weights' gradients, wait for the collective.

All of it is the same arithmetic in another order, so results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab.sharding.group import TensorGroup, no_view, refuse_second_derivatives


class Late:
    """The products of one pass through a block that give its weights' gradients, put aside."""

    def __init__(self) -> None:
        self._task = -1
        self._waiting: list[tuple[int, Callable[[], Tensor]]] = []

    def add(self, index: int, gradient: Callable[[], Tensor]) -> None:
        """Put aside the gradient of the block's tensor of that index."""
        task = torch._C._current_graph_task_id()
        if task != self._task:  # what a backward pass that failed has left behind is dropped
            self._task, self._waiting = task, []
        self._waiting.append((index, gradient))

    def into(self, gradients: list[Tensor | None]) -> None:
        """Compute what was put aside and add it to the gradients of the block's tensors."""
        waiting, self._waiting = self._waiting, []
        for index, compute in waiting:
            value, before = compute(), gradients[index]
            gradients[index] = value if before is None else before + value


class Holding(Protocol):
    """The units with which a pass computes: the own ones, or those of a lease."""

    def rows(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Of each of the block's parameters what to compute with."""

    def gradients(
        self, gradients: Sequence[Tensor | None], parameters: Sequence[tuple[torch.Size, torch.dtype]]
    ) -> Sequence[Tensor | None]:
        """The gradients of this rank's parameters from those of the rows."""


class Way(Protocol):
    """How a block's input gets in."""

    def keep(self, ctx: Any, x: Tensor) -> None:
        """Forward: keep what the backward pass of the block needs of the input."""

    def start(self, gradient: Tensor) -> Callable[[], Tensor]:
        """Backward: start to sum the gradient over the ranks; returns what waits for the sum."""


class AllReduced:
    """Every rank has the whole input."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def keep(self, ctx: Any, x: Tensor) -> None:
        """Nothing is needed."""

    def start(self, gradient: Tensor) -> Callable[[], Tensor]:
        # A copy: autograd may use the same tensor elsewhere.
        total = gradient.clone(memory_format=torch.contiguous_format)
        wait = self._group.start_all_reduce(total)

        def finish() -> Tensor:
            wait()
            return total

        return finish


def enter_block(
    x: Tensor,
    value: Tensor,
    parameters: Sequence[Tensor],
    *,
    group: TensorGroup,
    way: Way,
    holding: Holding,
) -> tuple[Tensor, list[Tensor], Late]:
    """A block's input and the rows of its parameters to compute with.

    Args:
        x: the input as this rank has it, which gets the gradient.
        value: what the block computes with: all places of it.
    """
    late = Late()
    entered, *rows = _Entrance.apply(x, value.detach(), group, way, holding, late, *parameters)  # type: ignore[no-untyped-call]
    # One input that needs a gradient makes every output of a node seem to need one.
    entered = entered if x.requires_grad else entered.detach()
    own = [
        each if parameter.requires_grad else each.detach()
        for each, parameter in zip(rows, parameters, strict=True)
    ]
    return entered, own, late


class _Entrance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: Tensor,
        group: TensorGroup,
        way: Way,
        holding: Holding,
        late: Late,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.group, ctx.way, ctx.holding, ctx.late = group, way, holding, late
        ctx.value = (value.shape, value.dtype, value.device)
        ctx.parameters = [(parameter.shape, parameter.dtype) for parameter in parameters]
        way.keep(ctx, x)
        group.compute_starts()
        return value.view_as(value), *holding.rows(parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        group: TensorGroup = ctx.group
        refuse_second_derivatives()
        gradient, of_rows = gradients[0], list(gradients[1:])
        finish, total = None, None
        if ctx.needs_input_grad[0]:
            shape, dtype, device = ctx.value
            finish = ctx.way.start(
                torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            )
        if finish is not None and not group.overlap:
            total = finish()
        ctx.late.into(of_rows)
        group.compute_ends()
        own = ctx.holding.gradients(of_rows, ctx.parameters)
        if finish is not None and group.overlap:
            total = finish()
        return total, None, None, None, None, None, *own


class Multiply(Protocol):
    """A product in another precision, as `trimtab.precision.linear.linear` computes it."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        transposed: bool,
        late: Callable[[str, Callable[[], Tensor]], None] | None,
    ) -> Tensor:
        """`x @ weight.t() + bias`, or `x @ weight` if `transposed`.

        Args:
            late: takes the gradient of "weight" and of "bias" as functions, to be called when the block's input
                gradient is under way; None if backward computes them itself.
        """


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    late: Late | None,
    places: dict[int, int],
    multiply: Multiply | None = None,
) -> Tensor:
    """`F.linear`; gradients of weight and bias are computed late where they can be.

    Args:
        places: index of the block's tensors by the id of their rows of this pass.
        multiply: computes it in another precision.
    """
    known = id(weight) in places and (bias is None or id(bias) in places)
    deferred = late is not None and known and not torch.compiler.is_compiling()
    if multiply is not None:
        own = _adding(late, places, weight, bias) if deferred else None
        return multiply(x, weight, bias, transposed=False, late=own)
    if not deferred:
        return F.linear(x, weight, bias)
    indices = (places[id(weight)], None if bias is None else places[id(bias)])
    return _Product.apply(x, weight, bias, late, indices, True)  # type: ignore[no-any-return,no-untyped-call]


def product(
    x: Tensor, weight: Tensor, late: Late | None, places: dict[int, int], multiply: Multiply | None = None
) -> Tensor:
    """`x @ weight`; the weight's gradient is computed late where it can be. See `linear`."""
    deferred = late is not None and id(weight) in places and not torch.compiler.is_compiling()
    if multiply is not None:
        own = _adding(late, places, weight, None) if deferred else None
        return multiply(x, weight, None, transposed=True, late=own)
    if not deferred:
        return x @ weight
    return _Product.apply(x, weight, None, late, (places[id(weight)], None), False)  # type: ignore[no-any-return,no-untyped-call]


def _adding(
    late: Late | None, places: dict[int, int], weight: Tensor, bias: Tensor | None
) -> Callable[[str, Callable[[], Tensor]], None]:
    assert late is not None
    indices = {"weight": places[id(weight)]}
    if bias is not None:
        indices["bias"] = places[id(bias)]
    return lambda which, gradient: late.add(indices[which], gradient)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        late: Late,
        indices: tuple[int, int | None],
        transposed: bool,
    ) -> Tensor:
        ctx.late, ctx.indices, ctx.transposed, ctx.dtype = late, indices, transposed, x.dtype
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            low = torch.get_autocast_dtype(kind)
            x, weight = (v if v.dtype == torch.float64 else v.to(low) for v in (x, weight))
            bias = bias.to(weight.dtype) if bias is not None else None
        ctx.save_for_backward(x, weight)
        return no_view(F.linear(x, weight, bias) if transposed else x @ weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        rows, of_x = _as_matrix(gradient), None
        if ctx.needs_input_grad[0]:
            of_x = (rows @ (weight if ctx.transposed else weight.t())).view(x.shape).to(ctx.dtype)
        flat = _as_matrix(x)
        index, of_bias = ctx.indices
        if ctx.needs_input_grad[1]:
            first, second = (rows, flat) if ctx.transposed else (flat, rows)
            ctx.late.add(index, lambda: first.t() @ second)
        if of_bias is not None and ctx.needs_input_grad[2]:
            ctx.late.add(of_bias, lambda: rows.sum(0))
        return of_x, None, None, None, None, None


def _as_matrix(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)
