"""int8 products on a GPU, by Triton kernels; scales are folded as in `trimtab.precision.int8`."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.precision.draw import Draw, Operand
from trimtab.precision.gpu.gradients import input_gradient, weight_gradient
from trimtab.precision.gpu.products import product, transpose
from trimtab.precision.gpu.quantize import (
    padded,
    quantize_by_column,
    quantize_by_row,
    quantize_whole,
)
from trimtab.precision.int8 import Int8
from trimtab.precision.products import ColumnTotals, Operands, Sizes


class Int8Cuda(Int8):
    """Operands are (padded codes, scales by row)."""

    saves_input = saves_weight = True

    def weight(self, w: Tensor, draw: Draw, *, backward: bool = True) -> Operands:
        if self.by_row and not w.is_contiguous() and w.t().is_contiguous():
            _, codes, scales = quantize_by_column(w.t(), draw, Operand.WEIGHT)
            return codes, scales
        return self._operand(w, draw, Operand.WEIGHT)

    def saved_like(self, values: Tensor) -> Operands:
        rows, columns = values.shape
        codes = values.new_empty((padded(rows), padded(columns)), dtype=torch.int8)
        return codes, values.new_empty(rows, dtype=torch.float32)

    def forward(
        self, x: Operands, w: Operands, bias: Tensor | None, sizes: Sizes, dtype: torch.dtype
    ) -> Tensor:
        return product(x[0], w[0], sizes.m, sizes.n, dtype, row_scale=x[1], column_scale=w[1], bias=bias)

    def grad_input(self, g: Operands, w: Operands, sizes: Sizes, dtype: torch.dtype, draw: Draw) -> Tensor:
        operand = Operand.GRAD_FOR_INPUT
        if self.by_row:
            whole = input_gradient(g[0].device, g[0].dtype, sizes, dtype, draw.stochastic)
            if whole is not None:
                return whole(g[0], w[0], w[1], draw)
            codes, scales = quantize_by_row(g[0], draw, operand, column_factor=w[1])
        else:
            folded = g[0].float() * w[1]
            codes, _, scale = quantize_whole(folded, torch.int8, draw, operand, transposed=False)
            scales = scale.expand(sizes.m).contiguous()
        return product(codes, transpose(w[0]), sizes.m, sizes.k, dtype, row_scale=scales)

    def grad_weight(
        self,
        g: Operands,
        x: Operands,
        sizes: Sizes,
        transposed: bool,
        draw: Draw,
        totals: ColumnTotals | None = None,
    ) -> Tensor:
        operand = Operand.GRAD_FOR_WEIGHT
        if self.by_row:
            whole = weight_gradient(g[0].device, g[0].dtype, sizes, draw.stochastic, transposed)
            if whole is not None:
                return whole(g[0], x[0], x[1], draw, totals)
            _, codes, scales = quantize_by_column(g[0], draw, operand, row_factor=x[1], totals=totals)
        else:
            folded = g[0].float() * x[1][:, None]
            _, codes, scale = quantize_whole(folded, torch.int8, draw, operand, direct=False)
            scales = scale.expand(sizes.n).contiguous()
        inputs = transpose(x[0])
        if transposed:
            return product(inputs, codes, sizes.k, sizes.n, torch.float32, column_scale=scales)
        return product(codes, inputs, sizes.n, sizes.k, torch.float32, row_scale=scales)

    def _operand(self, values: Tensor, draw: Draw, operand: Operand) -> Operands:
        if self.by_row:
            return quantize_by_row(values, draw, operand)
        codes, _, scale = quantize_whole(values, torch.int8, draw, operand, transposed=False)
        return codes, scale.expand(len(values)).contiguous()
