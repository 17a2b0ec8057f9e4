"""int8 products on CPU: codes with exact int32 sums, dequantized in the epilogue.

A scale that varies along the summed axis cannot be factored out of the sum. So backward folds it into the gradient
before quantizing it: w's row scales multiply g's columns for grad_input, and x's row scales multiply g's rows for
grad_weight. The codes of the forward pass then serve backward unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trimtab.precision.draw import Draw, Operand
from trimtab.precision.quantize import Axis, product, quantize

if TYPE_CHECKING:
    from trimtab.precision.products import Operands, Sizes


class Int8:
    """oneDNN's int8 products (`torch._int_mm`) between our quantize and dequantize kernels."""

    saves_input, saves_weight = True, False

    def __init__(self, *, by_row: bool = True) -> None:
        self.by_row = by_row

    def input(self, x: torch.Tensor, draw: Draw) -> Operands:
        return self._operand(x, draw, Operand.INPUT)

    def weight(self, w: torch.Tensor, draw: Draw) -> Operands:
        return self._operand(w, draw, Operand.WEIGHT)

    def saved(self, operands: Operands) -> Operands:
        return operands

    def saved_like(self, values: torch.Tensor) -> Operands:
        codes = torch.empty_like(values, dtype=torch.int8)
        return codes, values.new_empty(values.shape[0], dtype=torch.float32)

    def forward(
        self, x: Operands, w: Operands, bias: torch.Tensor | None, sizes: Sizes, dtype: torch.dtype
    ) -> torch.Tensor:
        bias = None if bias is None else bias.detach().float()
        return product(x[0], w[0].t(), row_scale=x[1], column_scale=w[1], bias=bias).to(dtype)

    def gradient(self, g: torch.Tensor, draw: Draw) -> Operands:
        # Each product folds a different scale into g, so each quantizes it again.
        return (g,)

    def grad_input(
        self, g: Operands, w: Operands, sizes: Sizes, dtype: torch.dtype, draw: Draw
    ) -> torch.Tensor:
        axis: Axis = "rows" if self.by_row else "whole"
        codes, scales = quantize(g[0], axis, draw, Operand.GRAD_FOR_INPUT, column_factor=w[1])
        return product(codes, w[0], row_scale=scales.expand(len(codes)).contiguous()).to(dtype)

    def grad_weight(
        self, g: Operands, x: Operands, sizes: Sizes, transposed: bool, draw: Draw
    ) -> torch.Tensor:
        axis: Axis = "columns" if self.by_row else "whole"
        codes, scales = quantize(g[0], axis, draw, Operand.GRAD_FOR_WEIGHT, row_factor=x[1])
        scales = scales.expand(codes.shape[1]).contiguous()
        if transposed:
            return product(x[0].t(), codes, column_scale=scales)
        return product(codes.t(), x[0], row_scale=scales)

    def samples(self, rows: torch.Tensor, draw: Draw, operand: Operand) -> Operands:
        """Codes and scales by row, unpadded, from which a convolution assembles its operands."""
        return self._operand(rows, draw, operand)

    def assemble(self, codes: torch.Tensor, scales: torch.Tensor) -> Operands:
        """Operands from codes arranged in rows, and the rows' scales."""
        return codes, scales

    def _operand(self, values: torch.Tensor, draw: Draw, operand: Operand) -> Operands:
        codes, scales = quantize(values, "rows" if self.by_row else "whole", draw, operand)
        return codes, scales.expand(len(values)).contiguous()
