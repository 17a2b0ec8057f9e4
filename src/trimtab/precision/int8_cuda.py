"""int8 products on a GPU: `torch._int_mm` between Triton kernels; scales are folded as in `trimtab.precision.int8`."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.precision.draw import Draw, Operand
from trimtab.precision.int8 import Int8
from trimtab.precision.products import Operands, Sizes
from trimtab.precision.triton_quantize import (
    PAD,
    dequantize,
    pad_codes,
    padded,
    quantize_by_row,
    quantize_whole,
)

MIN_ROWS = 32
"""`torch._int_mm` needs more than 16 rows on a GPU."""


class Int8Cuda(Int8):
    """Operands are (padded codes, scales by row)."""

    saves_input = saves_weight = True

    def saved_like(self, values: Tensor) -> Operands:
        rows, columns = values.shape
        codes = values.new_empty((padded(rows), padded(columns)), dtype=torch.int8)
        return codes, values.new_empty(rows, dtype=torch.float32)

    def forward(
        self, x: Operands, w: Operands, bias: Tensor | None, sizes: Sizes, dtype: torch.dtype
    ) -> Tensor:
        sums = integer_product(x[0], w[0])
        return dequantize(sums, sizes.m, sizes.n, dtype, row_scale=x[1], column_scale=w[1], bias=bias)

    def grad_input(self, g: Operands, w: Operands, sizes: Sizes, dtype: torch.dtype, draw: Draw) -> Tensor:
        codes, scales = quantize_by_row(g[0], torch.int8, draw, Operand.GRAD_FOR_INPUT, column_factor=w[1])
        sums = integer_product(codes, w[0].t().contiguous())
        return dequantize(sums, sizes.m, sizes.k, dtype, row_scale=scales)

    def grad_weight(self, g: Operands, x: Operands, sizes: Sizes, transposed: bool, draw: Draw) -> Tensor:
        folded = g[0].float() * x[1][:, None]
        _, codes, scale = quantize_whole(folded, torch.int8, draw, Operand.GRAD_FOR_WEIGHT, direct=False)
        inputs = x[0].t().contiguous()
        if transposed:
            sums, rows, columns = integer_product(inputs, codes), sizes.k, sizes.n
        else:
            sums, rows, columns = integer_product(codes, inputs), sizes.n, sizes.k
        return dequantize(sums, rows, columns, torch.float32, row_scale=scale.expand(rows).contiguous())

    def samples(self, rows: Tensor, draw: Draw, operand: Operand) -> Operands:
        codes, scales = self._operand(rows, draw, operand)
        return codes[: len(rows), : rows.shape[1]], scales

    def assemble(self, codes: Tensor, scales: Tensor) -> Operands:
        return pad_codes(codes), scales.contiguous()

    def _operand(self, values: Tensor, draw: Draw, operand: Operand) -> Operands:
        if self.by_row:
            return quantize_by_row(values, torch.int8, draw, operand)
        codes, _, scale = quantize_whole(values, torch.int8, draw, operand, transposed=False)
        return codes, scale.expand(len(values)).contiguous()


def integer_product(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ in int32, both row-major and padded."""
    assert a.shape[1] % PAD == 0
    assert len(b) % PAD == 0
    if 0 in (*a.shape, len(b)):
        return torch.zeros((len(a), len(b)), dtype=torch.int32, device=a.device)
    if len(a) < MIN_ROWS:
        a = torch.nn.functional.pad(a, (0, 0, 0, MIN_ROWS - len(a)))
    return torch._int_mm(a, b.t())
