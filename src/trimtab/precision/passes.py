"""Forward and backward of x wᵀ + bias, each product in its own precision, as plain functions of tensors.

`linear` and `conv` wrap them for autograd and for torch.compile.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from trimtab.precision.draw import Draw
from trimtab.precision.products import Full, Half, Operands, Products, Sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.precision_names import Precision, PrecisionName


@lru_cache
def products_for(name: PrecisionName, scales: str | None, rounding: str | None, device_type: str) -> Products:
    """The implementation of a precision for a type of device."""
    if name in ("fp32", "tf32"):
        return Full(tf32=name == "tf32")
    if name in ("bf16", "fp16"):
        return Half(name)
    if name == "fp8":
        from trimtab.precision.fp8 import Fp8

        return Fp8(rounding=rounding)
    if device_type == "cuda":
        from trimtab.precision.int8_cuda import Int8Cuda

        return Int8Cuda(by_row=scales != "tensor")
    from trimtab.precision.int8 import Int8

    return Int8(by_row=scales != "tensor")


def products_of(precision: Precision, device_type: str) -> tuple[Products, Products, Products]:
    """The implementations of forward, input gradient and weight gradient."""
    forward, grad_input, grad_weight = (
        products_for(name, precision.scales, precision.rounding, device_type) for name in precision.names
    )
    return forward, grad_input, grad_weight


def draw_of(precision: Precision, base: int, calls: torch.Tensor) -> Draw:
    """The random stream of an operator's rounding."""
    return Draw(base, calls, precision.rounding != "nearest")


def forward_pass(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    precision: Precision,
    draw: Draw,
    dtype: torch.dtype,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[torch.Tensor, Operands, Operands]:
    """y = x wᵀ + bias in `dtype`, and the saved operands of x and of w.

    Args:
        needs: whether the gradients of x and of w will be needed; nothing is saved for one that is not.
    """
    forward, grad_input, grad_weight = products_of(precision, x.device.type)
    with no_autocast(x.device.type):
        x_operands, w_operands = forward.input(x, draw), forward.weight(w, draw)
        sizes = Sizes(x.shape[0], w.shape[0], x.shape[1])
        y = forward.forward(x_operands, w_operands, bias, sizes, dtype)
        saved_x: Operands = ()
        saved_w: Operands = ()
        if needs[1]:
            same = grad_weight is forward
            saved_x = grad_weight.saved(x_operands if same else grad_weight.input(x, draw))
        if needs[0] and grad_input.saves_weight:
            same = grad_input is forward
            saved_w = grad_input.saved(w_operands if same else grad_input.weight(w, draw))
        elif needs[0]:
            saved_w = (w,)
    return y, saved_x, saved_w


def backward_pass(
    g: torch.Tensor,
    saved_x: Sequence[torch.Tensor],
    saved_w: Sequence[torch.Tensor],
    precision: Precision,
    draw: Draw,
    inputs: int,
    transposed: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x in `dtype` and of w in fp32 (transposed if `transposed`); None where no operand was saved.

    Args:
        draw: the one of the forward pass, so that recomputed operands are the same.
        inputs: number of columns of x.
    """
    sizes = Sizes(g.shape[0], g.shape[1], inputs)
    _, grad_input, grad_weight = products_of(precision, g.device.type)
    with no_autocast(g.device.type):
        gx = gw = None
        operands: Operands | None = None
        if saved_w:
            operands = grad_input.gradient(g, draw)
            w_operands = tuple(saved_w)
            if not grad_input.saves_weight:
                w_operands = grad_input.saved(grad_input.weight(saved_w[0], draw))
            gx = grad_input.grad_input(operands, w_operands, sizes, dtype, draw)
        if saved_x:
            if operands is None or grad_weight is not grad_input:
                operands = grad_weight.gradient(g, draw)
            gw = grad_weight.grad_weight(operands, tuple(saved_x), sizes, transposed, draw)
    return gx, gw


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Disable autocast, so that products run in the dtypes of their operands."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def result_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of an operator's output: autocast's if it is enabled, else the input's."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
