"""fp8 products on a GPU: e4m3 inputs and weights, e5m2 gradients, one scale for each tensor.

Tensor cores sum along the axis that is contiguous in both operands. So one kernel writes the codes of an operand
and their transpose, and backward saves the transpose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.precision.draw import Draw, Operand
from trimtab.precision.gpu.quantize import padded, quantize_whole
from trimtab.precision.products import ColumnTotals, Operands, Products, Sizes

FAST_SUMS = (True, False)
"""Whether forward and backward may use the tensor cores' shorter accumulator."""


class Fp8(Products):
    """Operands are (codes, transposed codes, scale); saved: (transposed codes, scale)."""

    saves_input = saves_weight = True

    def __init__(self, *, rounding: str | None = None) -> None:
        self.stochastic_inputs = rounding == "stochastic"

    def input(self, x: Tensor, draw: Draw, *, backward: bool = True) -> Operands:
        return self._operand(x, draw, Operand.INPUT, True, backward)

    def saved_input(self, x: Tensor, draw: Draw) -> Operands:
        return self._operand(x, draw, Operand.INPUT, False, True)[1:]

    def weight(self, w: Tensor, draw: Draw, *, backward: bool = True) -> Operands:
        if not w.is_contiguous() and w.t().is_contiguous():
            transposed, codes, scale = self._operand(w.t(), draw, Operand.WEIGHT, backward, True)
            return codes, transposed, scale
        return self._operand(w, draw, Operand.WEIGHT, True, backward)

    def saved(self, operands: Operands) -> Operands:
        return operands[1:]

    def saved_like(self, values: Tensor) -> Operands:
        rows, columns = values.shape
        transposed = values.new_empty((padded(columns), padded(rows)), dtype=torch.float8_e4m3fn)
        return transposed, values.new_empty((), dtype=torch.float32)

    def forward(
        self, x: Operands, w: Operands, bias: Tensor | None, sizes: Sizes, dtype: torch.dtype
    ) -> Tensor:
        fused = None
        if bias is not None and dtype == torch.bfloat16 and len(w[0]) == sizes.n:
            fused, bias = bias.to(dtype), None  # added in the product's epilogue
        y = scaled_product(x[0], w[0], x[2], w[2], dtype, fast=FAST_SUMS[0], bias=fused)
        y = _unpadded(y, sizes.m, sizes.n)
        return y if bias is None else (y + bias).to(dtype)

    def gradient(self, g: Tensor, draw: Draw, totals: ColumnTotals | None = None) -> Operands:
        return quantize_whole(g, torch.float8_e5m2, draw, Operand.GRAD_FOR_INPUT, totals=totals)

    def grad_input(self, g: Operands, w: Operands, sizes: Sizes, dtype: torch.dtype, draw: Draw) -> Tensor:
        y = scaled_product(g[0], w[0], g[2], w[1], dtype, fast=FAST_SUMS[1])
        return _unpadded(y, sizes.m, sizes.k)

    def grad_weight(
        self,
        g: Operands,
        x: Operands,
        sizes: Sizes,
        transposed: bool,
        draw: Draw,
        totals: ColumnTotals | None = None,
    ) -> Tensor:
        if transposed:
            y = scaled_product(x[0], g[1], x[1], g[2], torch.float32, fast=FAST_SUMS[1])
            return _unpadded(y, sizes.k, sizes.n)
        y = scaled_product(g[1], x[0], g[2], x[1], torch.float32, fast=FAST_SUMS[1])
        return _unpadded(y, sizes.n, sizes.k)

    def _operand(
        self, values: Tensor, draw: Draw, operand: Operand, direct: bool, transposed: bool
    ) -> Operands:
        if draw.stochastic != self.stochastic_inputs:
            draw = Draw(draw.base, draw.calls, self.stochastic_inputs)
        return quantize_whole(
            values, torch.float8_e4m3fn, draw, operand, direct=direct, transposed=transposed
        )


def _unpadded(y: Tensor, rows: int, columns: int) -> Tensor:
    return y if y.shape == (rows, columns) else y[:rows, :columns].contiguous()


def scaled_product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """a bᵀ · scales + bias, both row-major, in `dtype`."""
    if 0 in (*a.shape, len(b)):
        return torch.zeros((len(a), len(b)), dtype=dtype, device=a.device)
    out_dtype = dtype if dtype in (torch.float32, torch.bfloat16) else torch.bfloat16
    y = torch._scaled_mm(
        a, b.t(), scale_a=a_scale, scale_b=b_scale, bias=bias, out_dtype=out_dtype, use_fast_accum=fast
    )
    return y if out_dtype == dtype else y.to(dtype)
