"""A convolution in a chosen precision: 2-D, grouped, strided, dilated (1-D is 2-D with one row).

fp32, tf32 and half types use cuDNN or oneDNN. int8, which CPUs offer, becomes matrix products: the input is quantized
once, with one scale per sample, and its codes are unfolded into rows, one for each position of the kernel. Backward
saves the codes, not the rows. Codes are stored channels last, so that unfolding copies contiguous channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo

from trimtab.precision.draw import Draw, Operand
from trimtab.precision.linear import no_autocast, products_for, result_dtype, shares_input
from trimtab.precision.once import differentiable_once, refuse_transforms
from trimtab.precision.products import Float, Operands, Sizes, unscaled
from trimtab.precision_names import Precision, PrecisionName

Pair = tuple[int, int]


class Geometry(NamedTuple):
    """How a kernel moves over its input, and the shapes of both."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    x_shape: torch.Size
    w_shape: torch.Size

    @property
    def output(self) -> Pair:
        """Height and width of the output."""
        height, width = (
            (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for size, pad, dilation, kernel, stride in zip(
                self.x_shape[2:], self.padding, self.dilation, self.w_shape[2:], self.stride, strict=True
            )
        )
        return height, width

    def parts(self) -> list[slice]:
        """The outputs of each group."""
        n = self.w_shape[0] // self.groups
        return [slice(group * n, (group + 1) * n) for group in range(self.groups)]


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    precision: Precision,
    draw: Draw,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """As `torch.nn.functional.conv2d`, its products in the given precision; x is N × C × H × W."""
    dtype = dtype or result_dtype(x)
    if len(x) == 0:  # nothing to quantize
        return F.conv2d(x.to(weight.dtype), weight, bias, *geometry[:4]).to(dtype)
    if not torch.compiler.is_compiling():
        refuse_transforms()
    shared = not torch.compiler.is_compiling() and shares_input(x, precision)
    arguments = (x, weight, bias, geometry, precision, draw, dtype, shared)
    run = _break_graph if torch.compiler.is_compiling() else _Conv.apply
    result: Tensor = run(*arguments)
    return result


@_disable_dynamo  # unlike torch.compiler.disable, imports the compiler only when called
def _break_graph(*arguments: Any) -> Any:
    return _Conv.apply(*arguments)  # type: ignore[no-untyped-call]


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        precision: Precision,
        draw: Draw,
        dtype: torch.dtype,
        shared: bool,
    ) -> Tensor:
        passes = _passes(precision, x.device.type)
        with no_autocast(x.device.type):
            x_operands, w_operands = passes[0].input(x, draw), passes[0].weight(weight, draw)
            y: Tensor = passes[0].forward(x_operands, w_operands, bias, geometry).to(dtype)
            # Saving the weight costs no memory; its operands are recomputed.
            saved_w: Operands = (weight,) if ctx.needs_input_grad[0] else ()
            saved_x: Operands = ()
            if ctx.needs_input_grad[1]:
                same = x_operands if passes[2] is passes[0] else None
                saved_x = (x,) if shared else same or passes[2].input(x, draw)
        ctx.save_for_backward(*saved_x, *saved_w)
        ctx.split, ctx.shared = len(saved_x), shared
        ctx.setting = geometry, precision, draw
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return differentiable_once(_gradients, ctx, g)


def _gradients(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    geometry, precision, draw = ctx.setting
    saved = ctx.saved_tensors
    x, w = saved[: ctx.split], saved[ctx.split :]
    passes = _passes(precision, g.device.type)
    gx = gw = gb = None
    with no_autocast(g.device.type):
        if ctx.needs_input_grad[0]:
            w_operands = passes[1].weight(w[0], draw)
            gx = passes[1].grad_input(g, w_operands, geometry, draw).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            x = passes[2].input(x[0], draw) if ctx.shared else x
            gw = passes[2].grad_weight(g, x, geometry, draw).to(ctx.dtypes[1])
        if ctx.needs_input_grad[2]:
            gb = g.sum((0, 2, 3), dtype=torch.float32).to(ctx.dtypes[2])
    return gx, gw, gb, None, None, None, None, None


class _Direct:
    """torch's convolutions in fp32, tf32 or a half type."""

    def __init__(self, name: PrecisionName) -> None:
        self.type = Float(name)

    def input(self, x: Tensor, draw: Draw) -> Operands:
        return (x.to(self.type.dtype),)

    def weight(self, w: Tensor, draw: Draw) -> Operands:
        return (w.to(self.type.dtype),)

    def forward(self, x: Operands, w: Operands, bias: Tensor | None, geometry: Geometry) -> Tensor:
        bias = None if bias is None else bias.to(self.type.dtype)
        with self.type.arithmetic():
            return F.conv2d(x[0], w[0], bias, *geometry[:4])

    def grad_input(self, g: Tensor, w: Operands, geometry: Geometry, draw: Draw) -> Tensor:
        # Only the shape of the input matters here, so an expanded scalar will do.
        return self._backward(g, w[0].new_zeros(()).expand(geometry.x_shape), w[0], geometry, 0)

    def grad_weight(self, g: Tensor, x: Operands, geometry: Geometry, draw: Draw) -> Tensor:
        values = x[0]
        on_cpu = values.device.type == "cpu" and values.dtype != torch.float32
        if on_cpu and has_position_on_padding_only(geometry):
            # oneDNN does not write the gradient of such kernel positions (torch 2.13), except in fp32.
            return _Direct("fp32").grad_weight(g, (values.float(),), geometry, draw)
        return self._backward(g, values, values.new_zeros(()).expand(geometry.w_shape), geometry, 1)

    def _backward(self, g: Tensor, x: Tensor, w: Tensor, geometry: Geometry, which: int) -> Tensor:
        scaled, *scale = self.type.scaled(g)
        stride, padding, dilation, groups, *_ = geometry
        with self.type.arithmetic():
            grads = torch.ops.aten.convolution_backward(
                scaled, x, w, None, stride, padding, dilation, False, (0, 0), groups,
                (which == 0, which == 1, False),
            )  # fmt: skip
        return unscaled(grads[which], tuple(scale), torch.float32 if scale else grads[which].dtype)


def has_position_on_padding_only(geometry: Geometry) -> bool:
    """Whether some element of the kernel only ever meets padding."""
    axes = zip(
        geometry.x_shape[2:], geometry.w_shape[2:], geometry.output, geometry.stride, geometry.padding,
        geometry.dilation, strict=True,
    )  # fmt: skip
    return any(
        not any(0 <= output * s + element * d - p < size for output in range(outputs))
        for size, kernel, outputs, s, p, d in axes
        for element in range(kernel)
    )


class _Columns:
    """Matrix products of 8-bit codes, group by group.

    Operands are (codes, scales by row). The input's codes are samples × height × width × channels, the weight's
    outputs × (height · width · channels of a group).
    """

    def __init__(self, products: Any) -> None:
        self.products = products

    def input(self, x: Tensor, draw: Draw) -> Operands:
        channels_last = x.permute(0, 2, 3, 1).contiguous()
        codes, scales = self.products.samples(channels_last.flatten(1), draw, Operand.INPUT)
        return codes.reshape(channels_last.shape), scales

    def weight(self, w: Tensor, draw: Draw) -> Operands:
        codes, scales = self.products.samples(w.permute(0, 2, 3, 1).flatten(1), draw, Operand.WEIGHT)
        return codes.contiguous(), scales

    def forward(self, x: Operands, w: Operands, bias: Tensor | None, geometry: Geometry) -> Tensor:
        samples, (height, width) = geometry.x_shape[0], geometry.output
        parts = []
        for own, columns in zip(geometry.parts(), _unfolded(x[0], geometry), strict=True):
            sizes = Sizes(samples * height * width, own.stop - own.start, w[0].shape[1])
            x_operands = self.products.assemble(columns, x[1].repeat_interleave(height * width))
            w_operands = self.products.assemble(w[0][own], w[1][own].contiguous())
            own_bias = None if bias is None else bias.detach()[own].contiguous()
            parts.append(self.products.forward(x_operands, w_operands, own_bias, sizes, torch.float32))
        y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        y = y.view(samples, height, width, -1).permute(0, 3, 1, 2)
        # Not a view: autograd forbids to change a view that a function returns in place.
        return y.new_empty(0).set_(y.untyped_storage(), y.storage_offset(), y.shape, y.stride())

    def grad_input(self, g: Tensor, w: Operands, geometry: Geometry, draw: Draw) -> Tensor:
        rows = g.permute(0, 2, 3, 1).reshape(-1, geometry.w_shape[0])
        parts = []
        for own in geometry.parts():
            sizes = Sizes(len(rows), own.stop - own.start, w[0].shape[1])
            w_operands = self.products.saved(self.products.assemble(w[0][own], w[1][own].contiguous()))
            operands = self.products.gradient(rows[:, own], draw)
            parts.append(self.products.grad_input(operands, w_operands, sizes, torch.float32, draw))
        return _folded(parts, geometry)

    def grad_weight(self, g: Tensor, x: Operands, geometry: Geometry, draw: Draw) -> Tensor:
        outputs, inputs, height, width = geometry.w_shape
        rows = g.permute(0, 2, 3, 1).reshape(-1, outputs)
        scales = x[1].repeat_interleave(len(rows) // geometry.x_shape[0])
        parts = []
        for own, columns in zip(geometry.parts(), _unfolded(x[0], geometry), strict=True):
            sizes = Sizes(len(rows), own.stop - own.start, inputs * height * width)
            x_operands = self.products.saved(self.products.assemble(columns, scales))
            operands = self.products.gradient(rows[:, own], draw)
            parts.append(self.products.grad_weight(operands, x_operands, sizes, False, draw))
        channels_last = torch.cat(parts).view(outputs, height, width, inputs)
        return channels_last.permute(0, 3, 1, 2).contiguous()


def _passes(precision: Precision, device_type: str) -> tuple[Any, Any, Any]:
    """The implementations of the three passes; passes in the same precision share one object."""
    by_name: dict[PrecisionName, Any] = {}
    for name in precision.names:
        if name not in by_name:
            if name == "int8" and device_type != "meta":
                by_name[name] = _Columns(
                    products_for(name, precision.scales, precision.rounding, device_type)
                )
            else:
                by_name[name] = _Direct(name)
    return by_name[precision.forward], by_name[precision.grad_input], by_name[precision.grad_weight]


def _unfolded(codes: Tensor, geometry: Geometry) -> list[Tensor]:
    """For each group: one row of the codes under the kernel for each output position of each sample."""
    samples, _, _, channels = codes.shape
    (height, width), w_shape = geometry.output, geometry.w_shape
    # As bytes, which can be padded and gathered whatever the 8-bit type.
    raw = F.pad(codes.view(torch.int8), (0, 0, *(geometry.padding[1],) * 2, *(geometry.padding[0],) * 2))
    sample, row, column, _ = raw.stride()
    (down, right), (below, beside) = geometry.stride, geometry.dilation
    windows = raw.as_strided(
        (samples, height, width, w_shape[2], w_shape[3], channels),
        (sample, row * down, column * right, row * below, column * beside, 1),
    )
    own = channels // geometry.groups
    return [
        windows[..., at : at + own].reshape(-1, w_shape[1:].numel()).view(codes.dtype)
        for at in range(0, channels, own)
    ]


def _folded(parts: list[Tensor], geometry: Geometry) -> Tensor:
    """The adjoint of `_unfolded`, in fp32: each output position adds its row to the inputs under the kernel."""
    (down, right), (top, left), (below, beside), groups, x_shape, w_shape = geometry
    samples, channels, rows, columns = x_shape
    height, width = geometry.output
    total = parts[0].new_zeros((samples, rows + 2 * top, columns + 2 * left, channels))
    own = channels // groups
    for group, part in enumerate(parts):
        windows = part.view(samples, height, width, w_shape[2], w_shape[3], own)
        into = total[..., group * own : (group + 1) * own]
        for i in range(w_shape[2]):
            for j in range(w_shape[3]):
                y, x = i * below, j * beside
                inputs = into[
                    :, y : y + down * (height - 1) + 1 : down, x : x + right * (width - 1) + 1 : right
                ]
                inputs += windows[:, :, :, i, j]
    return total[:, top : top + rows, left : left + columns].permute(0, 3, 1, 2)
