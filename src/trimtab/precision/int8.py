"""int8 products on CPU: codes with exact int32 sums, dequantized in the epilogue.

A scale that varies along the summed axis cannot be factored out of the sum. So backward folds it into the gradient
before quantizing it: w's row scales multiply g's columns for grad_input, and x's row scales multiply g's rows for
grad_weight. The codes of the forward pass then serve backward unchanged.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trimtab.codec.native import available
from trimtab.precision import native, reference
from trimtab.precision.draw import Draw, Operand
from trimtab.precision.products import ColumnTotals, Operands, Products, Sizes

Axis = Literal["rows", "columns", "whole"]
"""One scale for each row, for each column, or for the whole matrix."""

LONGEST_SUM = 1 << 17
"""Number of products of two codes whose sum always fits an int32: 2³¹ / 127², rounded down to a power of two."""


class Int8(Products):
    """oneDNN's int8 products (`torch._int_mm`) between our quantize and dequantize kernels."""

    saves_input, saves_weight = True, False

    def __init__(self, *, by_row: bool = True) -> None:
        self.by_row = by_row

    def input(self, x: Tensor, draw: Draw, *, backward: bool = True) -> Operands:
        return self._operand(x, draw, Operand.INPUT)

    def weight(self, w: Tensor, draw: Draw, *, backward: bool = True) -> Operands:
        return self._operand(w, draw, Operand.WEIGHT)

    def saved_like(self, values: Tensor) -> Operands:
        codes = torch.empty_like(values, dtype=torch.int8)
        return codes, values.new_empty(values.shape[0], dtype=torch.float32)

    def forward(
        self, x: Operands, w: Operands, bias: Tensor | None, sizes: Sizes, dtype: torch.dtype
    ) -> Tensor:
        bias = None if bias is None else bias.detach().float()
        return product(x[0], w[0].t(), row_scale=x[1], column_scale=w[1], bias=bias).to(dtype)

    def gradient(self, g: Tensor, draw: Draw, totals: ColumnTotals | None = None) -> Operands:
        # Each product folds a different scale into g, so each quantizes it again.
        return (g,)

    def grad_input(self, g: Operands, w: Operands, sizes: Sizes, dtype: torch.dtype, draw: Draw) -> Tensor:
        axis: Axis = "rows" if self.by_row else "whole"
        codes, scales = quantize(g[0], axis, draw, Operand.GRAD_FOR_INPUT, column_factor=w[1])
        return product(codes, w[0], row_scale=scales.expand(len(codes)).contiguous()).to(dtype)

    def grad_weight(
        self,
        g: Operands,
        x: Operands,
        sizes: Sizes,
        transposed: bool,
        draw: Draw,
        totals: ColumnTotals | None = None,
    ) -> Tensor:
        axis: Axis = "columns" if self.by_row else "whole"
        codes, scales = quantize(g[0], axis, draw, Operand.GRAD_FOR_WEIGHT, row_factor=x[1])
        scales = scales.expand(codes.shape[1]).contiguous()
        if transposed:
            return product(x[0].t(), codes, column_scale=scales)
        return product(codes.t(), x[0], row_scale=scales)

    def samples(self, rows: Tensor, draw: Draw, operand: Operand) -> Operands:
        """Codes and scales by row, unpadded, from which a convolution assembles its operands."""
        return self._operand(rows, draw, operand)

    def assemble(self, codes: Tensor, scales: Tensor) -> Operands:
        """Operands from codes arranged in rows, and the rows' scales."""
        return codes, scales

    def _operand(self, values: Tensor, draw: Draw, operand: Operand) -> Operands:
        codes, scales = quantize(values, "rows" if self.by_row else "whole", draw, operand)
        return codes, scales.expand(len(values)).contiguous()


def quantize(
    values: Tensor,
    axis: Axis,
    draw: Draw,
    operand: Operand,
    *,
    row_factor: Tensor | None = None,
    column_factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes in −127…127 and their scales: values · factors ≈ codes · scale.

    With stochastic rounding the expectation of codes · scale is the value itself. A row (column, matrix) that
    contains NaN or Inf has the scale NaN, so that its products are NaN too. The matrix may be transposed.

    Returns:
        Codes, int8, with the shape and strides of the values; scales, fp32, one for each row, each column, or all.
    """
    flipped = not values.is_contiguous() and values.t().is_contiguous()
    if flipped:
        values, row_factor, column_factor = values.t(), column_factor, row_factor
        axis = {"rows": "columns", "columns": "rows"}.get(axis, axis)  # type: ignore[assignment]
    kernel = native.quantize if available() else reference.quantize
    codes, scales = kernel(
        values.detach().to(torch.float32).contiguous(),
        axis,
        key=draw.key(operand),
        stochastic=draw.stochastic,
        row_factor=row_factor,
        column_factor=column_factor,
    )
    return codes.t() if flipped else codes, scales


def product(
    a: Tensor,
    b: Tensor,
    *,
    row_scale: Tensor | None = None,
    column_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """(a @ b) · row_scale · column_scale + bias in fp32, from int8 codes with exact int32 sums."""
    length = a.shape[1]
    if length > LONGEST_SUM:
        parts = [
            product(
                a[:, at : at + LONGEST_SUM],
                b[at : at + LONGEST_SUM],
                row_scale=row_scale,
                column_scale=column_scale,
            )
            for at in range(0, length, LONGEST_SUM)
        ]
        total = torch.stack(parts).sum(0)
        return total if bias is None else total + bias
    if min(*a.shape, b.shape[1]) == 0:
        sums = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.int32)
    else:
        sums = torch._int_mm(_with_new_strides(a), _with_new_strides(b))
    kernel = native.dequantize if available() else reference.dequantize
    return kernel(sums, row_scale, column_scale, bias)


def _with_new_strides(codes: Tensor) -> Tensor:
    """The same codes, with strides that `torch._int_mm` reads right (torch 2.13 on CPU).

    It computes wrong sums, without an error, for a column viewed as a row, because it reads the stride of an axis of
    length 1, and for rows that overlap in memory, as the windows of a 1-D convolution over one sample do.
    """
    if 1 in codes.shape:
        return codes.contiguous().view(-1).view(codes.shape)
    (rows, columns), (down, across) = codes.shape, codes.stride()
    apart = (across == 1 and down >= columns) or (down == 1 and across >= rows)
    return codes if apart else codes.contiguous()
