"""A linear layer in a chosen precision: its passes, an autograd function, and an operator for torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.precision.devices import autocasts
from trimtab.precision.draw import Draw
from trimtab.precision.once import differentiable_once, refuse_transforms
from trimtab.precision.products import ColumnTotals, Float, Operands, Products, Sizes
from trimtab.precision.weight_codes import Kept, WeightCodes
from trimtab.precision_names import Precision, PrecisionName

Late = Callable[[str, Callable[[], Tensor]], None]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    precision: Precision,
    draw: Draw,
    *,
    transposed: bool = False,
    dtype: torch.dtype | None = None,
    late: Late | None = None,
    codes: WeightCodes | None = None,
) -> Tensor:
    """As `torch.nn.functional.linear`, its products in the given precision.

    Args:
        transposed: the weight is stored inputs × outputs, as in transformers' `Conv1D`.
        dtype: of the result; by default autocast's if it is enabled, else the input's.
        late: backward hands it the gradients of "weight" and "bias" as functions, and returns none itself.
        codes: the weight's, kept from one call to the next.
    """
    dtype = dtype or result_dtype(x)
    result: Tensor
    if torch.compiler.is_compiling():
        flat = x.reshape(-1, x.shape[-1])
        y, *_ = torch.ops.trimtab.linear(
            flat, weight, bias, draw.calls, draw.base, precision.encode(), transposed, dtype
        )
        result = y.reshape(*x.shape[:-1], y.shape[-1])
    elif not torch.is_grad_enabled():
        refuse_transforms()
        if codes is not None:
            codes.drop()  # evaluation may be with other weights in the same memory
        w = weight.t() if transposed else weight
        y, _, _ = forward_pass(x.reshape(-1, x.shape[-1]), w, bias, precision, draw, dtype, (False, False))
        result = y.view(*x.shape[:-1], y.shape[-1])
    else:
        refuse_transforms()
        setting = _Setting(precision, draw, transposed, dtype, shares_input(x, precision), late, codes)
        result = _Linear.apply(x, weight, bias, setting)  # type: ignore[no-untyped-call]
    return result


class _Setting(NamedTuple):
    """What is no tensor of a call, as one argument: autograd looks at each."""

    precision: Precision
    draw: Draw
    transposed: bool
    dtype: torch.dtype
    shared: bool
    late: Late | None
    codes: WeightCodes | None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, setting: _Setting) -> Tensor:
        precision, draw, transposed, dtype, shared, _, codes = setting
        w = weight.t() if transposed else weight
        # Reshaped in here: outside, each would be an autograd node of its own.
        flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        needs_x, needs_w = ctx.needs_input_grad[:2]
        eight_bits = precision.forward in ("int8", "fp8")
        kept = codes.of(weight, draw) if codes is not None and eight_bits else None
        y, saved_x, saved_w = forward_pass(
            flat, w, bias, precision, draw, dtype, (needs_x, needs_w and not shared), kept
        )
        if shared and needs_w:
            saved_x = (x,)
        ctx.save_for_backward(*saved_x, *saved_w)
        dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.of_forward = len(saved_x), x.shape, dtypes, setting
        # Not a view: autograd forbids to change a view that a function returns in place.
        return y if x.dim() == 2 else torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        gradients: tuple[Any, ...] = differentiable_once(_gradients, ctx, g)
        return gradients


def _gradients(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    split, shape, (dtype, weight_dtype, bias_dtype), setting = ctx.of_forward
    precision, draw, transposed, _, shared, late, _ = setting
    saved = ctx.saved_tensors
    saved_x, saved_w, inputs = saved[:split], saved[split:], shape[-1]
    needs_bias = ctx.needs_input_grad[2]
    g = g if g.dim() == 2 else g.reshape(-1, g.shape[-1])
    if shared and saved_x:
        grad_weight = products_of(precision, g.device.type)[2]
        saved_x = grad_weight.saved_input(saved_x[0].reshape(-1, inputs), draw)
    common = precision, draw, inputs, transposed, dtype

    if late is None:
        totals = ColumnTotals() if needs_bias else None
        gx, gw = backward_pass(g, saved_x, saved_w, *common, totals)
        gb = None if totals is None else totals.of(g)
        return _shaped(gx, shape), _in_type(gw, weight_dtype), _in_type(gb, bias_dtype), None

    def of_bias() -> Tensor:
        return ColumnTotals().of(g).to(bias_dtype)

    def of_weight() -> Tensor:
        _, gw = backward_pass(g, saved_x, (), *common)
        assert gw is not None
        return gw.to(weight_dtype)

    if saved_x:
        late("weight", of_weight)
    if needs_bias:
        late("bias", of_bias)
    gx, _ = backward_pass(g, (), saved_w, *common)
    return _shaped(gx, shape), None, None, None


def _shaped(values: Tensor | None, shape: torch.Size) -> Tensor | None:
    return values if values is None or len(shape) == 2 else values.view(shape)


def _in_type(values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return values if values is None or values.dtype == dtype else values.to(dtype)


@torch.library.custom_op("trimtab::linear", mutates_args=())
def _linear_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    calls: Tensor,
    base: int,
    precision: str,
    transposed: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    """y, then those saved operands of x and of w that are not x and w themselves."""
    chosen = Precision.decode(precision)
    w = weight.t() if transposed else weight
    y, saved_x, saved_w = forward_pass(x, w, bias, chosen, draw_of(chosen, base, calls), dtype)
    _, grad_input, grad_weight = products_of(chosen, x.device.type)
    saved = [*(saved_x if grad_weight.saves_input else ()), *(saved_w if grad_input.saves_weight else ())]
    # A registered operator may not return its arguments, as it would for a half operand of a half input.
    arguments = {tensor.untyped_storage().data_ptr() for tensor in (x, weight)}
    return [y, *(s.clone() if s.untyped_storage().data_ptr() in arguments else s for s in saved)]


@_linear_op.register_fake
def _(x: Tensor, weight: Tensor, *arguments: Any) -> list[Tensor]:
    _, _, _, precision, transposed, dtype = arguments
    _, grad_input, grad_weight = products_of(Precision.decode(precision), x.device.type)
    w = weight.t() if transposed else weight
    saved_x = grad_weight.saved_like(x) if grad_weight.saves_input else ()
    saved_w = grad_input.saved_like(w) if grad_input.saves_weight else ()
    return [x.new_empty((x.shape[0], w.shape[0]), dtype=dtype), *saved_x, *saved_w]


@torch.library.custom_op("trimtab::linear_backward", mutates_args=())
def _linear_backward_op(
    g: Tensor,
    saved_x: list[Tensor],
    saved_w: list[Tensor],
    calls: Tensor,
    base: int,
    precision: str,
    transposed: bool,
    inputs: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """The gradients of x in `dtype` and of the weight in fp32."""
    chosen = Precision.decode(precision)
    gx, gw = backward_pass(
        g, saved_x, saved_w, chosen, draw_of(chosen, base, calls), inputs, transposed, dtype
    )
    assert gx is not None
    assert gw is not None
    return [gx, gw]


@_linear_backward_op.register_fake
def _(g: Tensor, *arguments: Any) -> list[Tensor]:
    *_, transposed, inputs, dtype = arguments
    tokens, outputs = g.shape
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    return [g.new_empty((tokens, inputs), dtype=dtype), g.new_empty(shape, dtype=torch.float32)]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
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


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
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


@lru_cache
def products_for(name: PrecisionName, scales: str | None, rounding: str | None, device_type: str) -> Products:
    """The implementation of a precision for a type of device."""
    if name not in ("fp8", "int8") or device_type == "meta":  # which has shapes, but no values to quantize
        return Float(name)
    if name == "fp8":
        from trimtab.precision.gpu.fp8 import Fp8

        return Fp8(rounding=rounding)
    if device_type == "cuda":
        from trimtab.precision.gpu.int8 import Int8Cuda

        return Int8Cuda(by_row=scales != "tensor")
    from trimtab.precision.int8 import Int8

    return Int8(by_row=scales != "tensor")


@lru_cache
def products_of(precision: Precision, device_type: str) -> tuple[Products, Products, Products]:
    """The implementations of forward, input gradient and weight gradient."""
    forward, grad_input, grad_weight = (
        products_for(name, precision.scales, precision.rounding, device_type) for name in precision.names
    )
    return forward, grad_input, grad_weight


def draw_of(precision: Precision, base: int, calls: Tensor) -> Draw:
    """The random stream of an operator's rounding."""
    return Draw(base, calls, precision.rounding != "nearest")


def forward_pass(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    precision: Precision,
    draw: Draw,
    dtype: torch.dtype,
    needs: tuple[bool, bool] = (True, True),
    kept: Kept | None = None,
) -> tuple[Tensor, Operands, Operands]:
    """y = x wᵀ + bias in `dtype`, and the saved operands of x and of w.

    Args:
        needs: whether the gradients of x and of w will be needed; nothing is saved for one that is not.
        kept: what is known of w's operands from the calls before.
    """
    forward, grad_input, grad_weight = products_of(precision, x.device.type)
    same_x, same_w = grad_weight is forward, grad_input is forward
    with no_autocast(x.device.type):
        x_operands = forward.input(x, draw, backward=needs[1] and same_x)
        keeps = kept is not None and kept.keeps
        w_operands = None if kept is None else kept.operands
        if w_operands is None:
            w_operands = forward.weight(w, draw, backward=same_w and (needs[0] or keeps))
            if kept is not None and keeps:
                kept.operands = w_operands
        sizes = Sizes(x.shape[0], w.shape[0], x.shape[1])
        y = forward.forward(x_operands, w_operands, bias, sizes, dtype)
        saved_x: Operands = ()
        saved_w: Operands = ()
        if needs[1]:
            saved_x = grad_weight.saved(x_operands) if same_x else grad_weight.saved_input(x, draw)
        if needs[0] and (grad_input.saves_weight or (keeps and same_w)):
            saved_w = grad_input.saved(w_operands if same_w else grad_input.weight(w, draw))
        elif needs[0]:
            saved_w = (w,)
    return y, saved_x, saved_w


def backward_pass(
    g: Tensor,
    saved_x: Sequence[Tensor],
    saved_w: Sequence[Tensor],
    precision: Precision,
    draw: Draw,
    inputs: int,
    transposed: bool,
    dtype: torch.dtype,
    totals: ColumnTotals | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x in `dtype` and of w in fp32 (transposed if `transposed`); None where no operand was saved.

    Args:
        draw: the one of the forward pass, so that recomputed operands are the same.
        inputs: number of columns of x.
        totals: of g, filled in by a product that reads all of g anyway.
    """
    sizes = Sizes(g.shape[0], g.shape[1], inputs)
    _, grad_input, grad_weight = products_of(precision, g.device.type)
    with no_autocast(g.device.type):
        x, w = tuple(saved_x), tuple(saved_w)
        if len(w) == 1 and not grad_input.saves_weight:
            w = grad_input.saved(grad_input.weight(w[0], draw))
        gx = gw = None
        operands: Operands | None = None
        if w:
            operands = grad_input.gradient(g, draw, totals)
            gx = grad_input.grad_input(operands, w, sizes, dtype, draw)
        if x:
            if operands is None or grad_weight is not grad_input:
                operands = grad_weight.gradient(g, draw, totals)
            gw = grad_weight.grad_weight(operands, x, sizes, transposed, draw, totals)
    return gx, gw


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Disable autocast, so that products run in the dtypes of their operands."""
    if not autocasts(device_type):
        return nullcontext()
    if torch.compiler.is_compiling():
        return torch.autocast(device_type, enabled=False)
    return _NoAutocast(device_type)


class _NoAutocast:
    """Lighter than torch.autocast, which checks what it is given each time."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self._device_type, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self._device_type, True)


def shares_input(x: Tensor, precision: Precision) -> bool:
    """Whether backward makes the codes of a half input again, because the function before keeps that input anyway.

    A ReLU and attention keep their results: codes would be kept beside it and not instead of it.
    """
    if precision.grad_weight not in ("int8", "fp8") or x.dtype == torch.float32:
        return False
    function = x.grad_fn
    while function is not None and type(function).__name__ in _VIEWS:
        function = function.next_functions[0][0]
    # The class is asked: reading the attribute would unpack what was saved.
    return hasattr(type(function), "_saved_result") or hasattr(type(function), "_saved_output")


_VIEWS = frozenset(
    f"{name}Backward0"
    for name in ("View", "ReshapeAlias", "UnsafeView", "Alias", "Transpose", "Permute", "Unsqueeze")
)


def result_dtype(x: Tensor) -> torch.dtype:
    """The dtype of an operator's output: autocast's if it is enabled, else the input's."""
    if autocasts(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
