"""A linear layer in a chosen precision: an autograd function, and a registered operator for torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trimtab.precision.passes import backward_pass, draw_of, forward_pass, products_of, result_dtype
from trimtab.precision_names import Precision


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    precision: Precision,
    *,
    base: int,
    calls: torch.Tensor,
    transposed: bool = False,
) -> torch.Tensor:
    """As `torch.nn.functional.linear`, its products in the given precision.

    Args:
        base: the operator's random stream, see `trimtab.precision.draw.base_key`.
        calls: how often the model was called: one int64 on x's device.
        transposed: the weight is stored inputs × outputs, as in transformers' `Conv1D`.
    """
    dtype = result_dtype(x)
    flat = x.reshape(-1, x.shape[-1])
    if torch.compiler.is_compiling():
        y = torch.ops.trimtab.linear(flat, weight, bias, calls, base, precision.encode(), transposed, dtype)[
            0
        ]
    else:
        y = _Linear.apply(flat, weight, bias, precision, base, calls, transposed, dtype)  # type: ignore[no-untyped-call]
    result: torch.Tensor = y.reshape(*x.shape[:-1], y.shape[-1])
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        precision: Precision,
        base: int,
        calls: torch.Tensor,
        transposed: bool,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        w = weight.t() if transposed else weight
        needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        y, saved_x, saved_w = forward_pass(
            x, w, bias, precision, draw_of(precision, base, calls), dtype, needs
        )
        ctx.save_for_backward(*saved_x, *saved_w)
        ctx.split = len(saved_x)
        ctx.setting = precision, base, calls, transposed
        ctx.inputs = x.shape[1]
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        precision, base, calls, transposed = ctx.setting
        saved = ctx.saved_tensors
        gx, gw = backward_pass(
            g, saved[: ctx.split], saved[ctx.split :], precision, draw_of(precision, base, calls),
            ctx.inputs, transposed, ctx.dtypes[0],
        )  # fmt: skip
        gw = gw if gw is None else gw.to(ctx.dtypes[1])
        gb = g.sum(0, dtype=torch.float32).to(ctx.dtypes[2]) if ctx.needs_input_grad[2] else None
        return gx, gw, gb, None, None, None, None, None


@torch.library.custom_op("trimtab::linear", mutates_args=())
def _linear_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    calls: torch.Tensor,
    base: int,
    precision: str,
    transposed: bool,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """y, then those saved operands of x and of w that are not x and w themselves."""
    chosen = Precision.decode(precision)
    w = weight.t() if transposed else weight
    y, saved_x, saved_w = forward_pass(x, w, bias, chosen, draw_of(chosen, base, calls), dtype)
    _, grad_input, grad_weight = products_of(chosen, x.device.type)
    saved = [*(saved_x if grad_weight.saves_input else ()), *(saved_w if grad_input.saves_weight else ())]
    # A registered operator may not return its arguments, as it would for a half operand of a half input.
    return [y, *(s.clone() if _same_memory(s, x) or _same_memory(s, weight) else s for s in saved)]


@_linear_op.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    calls: torch.Tensor,
    base: int,
    precision: str,
    transposed: bool,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    _, grad_input, grad_weight = products_of(Precision.decode(precision), x.device.type)
    w = weight.t() if transposed else weight
    saved_x = grad_weight.saved_like(x) if grad_weight.saves_input else ()
    saved_w = grad_input.saved_like(w) if grad_input.saves_weight else ()
    return [x.new_empty((x.shape[0], w.shape[0]), dtype=dtype), *saved_x, *saved_w]


@torch.library.custom_op("trimtab::linear_backward", mutates_args=())
def _linear_backward_op(
    g: torch.Tensor,
    saved_x: list[torch.Tensor],
    saved_w: list[torch.Tensor],
    calls: torch.Tensor,
    base: int,
    precision: str,
    transposed: bool,
    inputs: int,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """The gradients of x in `dtype` and of the weight in fp32."""
    chosen = Precision.decode(precision)
    gx, gw = backward_pass(
        g, saved_x, saved_w, chosen, draw_of(chosen, base, calls), inputs, transposed, dtype
    )
    assert gx is not None
    assert gw is not None
    return [gx, gw]


@_linear_backward_op.register_fake
def _(
    g: torch.Tensor,
    saved_x: list[torch.Tensor],
    saved_w: list[torch.Tensor],
    calls: torch.Tensor,
    base: int,
    precision: str,
    transposed: bool,
    inputs: int,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    tokens, outputs = g.shape
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    return [g.new_empty((tokens, inputs), dtype=dtype), g.new_empty(shape, dtype=torch.float32)]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weight, bias, calls, base, precision, transposed, _ = inputs
    _, grad_input, grad_weight = products_of(Precision.decode(precision), x.device.type)
    saved = output[1:]
    split = len(grad_weight.saved_like(x)) if grad_weight.saves_input else 0
    saved_x = saved[:split] if grad_weight.saves_input else [x]
    saved_w = saved[split:] if grad_input.saves_weight else [weight.t() if transposed else weight]
    ctx.save_for_backward(calls, *saved_x, *saved_w)
    ctx.split = 1 + len(saved_x)
    ctx.setting = base, precision, transposed, x.shape[1]
    ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype


def _differentiate(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    g = grads[0]
    calls, *saved = ctx.saved_tensors
    base, precision, transposed, inputs = ctx.setting
    saved_x, saved_w = list(saved[: ctx.split - 1]), list(saved[ctx.split - 1 :])
    gx, gw = torch.ops.trimtab.linear_backward(
        g, saved_x, saved_w, calls, base, precision, transposed, inputs, ctx.dtypes[0]
    )
    gb = None if ctx.dtypes[2] is None else g.sum(0, dtype=torch.float32).to(ctx.dtypes[2])
    return gx, gw.to(ctx.dtypes[1]), gb, None, None, None, None, None


_linear_op.register_autograd(_differentiate, setup_context=_save_for_backward)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
