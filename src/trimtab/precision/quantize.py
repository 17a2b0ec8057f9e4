"""int8 operands on CPU: quantization and products with exact int32 sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from trimtab.precision import native, reference

if TYPE_CHECKING:
    from trimtab.precision.draw import Draw, Operand

Axis = Literal["rows", "columns", "whole"]
"""One scale for each row, for each column, or for the whole matrix."""

LONGEST_SUM = 1 << 17
"""Number of products of two codes whose sum always fits an int32: 2³¹ / 127², rounded down to a power of two."""


def quantize(
    values: torch.Tensor,
    axis: Axis,
    draw: Draw,
    operand: Operand,
    *,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in −127…127 and their scales: values · factors ≈ codes · scale.

    With stochastic rounding the expectation of codes · scale is the value itself. A row (column, matrix) that
    contains NaN or Inf has the scale NaN, so that its products are NaN too. The matrix may be transposed.

    Returns:
        Codes, int8, with the shape and strides of the values; scales, fp32, one for each row, each column, or all.
    """
    if not values.is_contiguous() and values.t().is_contiguous():
        transposed: dict[Axis, Axis] = {"rows": "columns", "columns": "rows", "whole": "whole"}
        codes, scales = quantize(
            values.t(), transposed[axis], draw, operand, row_factor=column_factor, column_factor=row_factor
        )
        return codes.t(), scales
    values = values.detach().to(torch.float32).contiguous()
    kernel = native.quantize if native.available() else reference.quantize
    return kernel(
        values,
        axis,
        key=draw.key(operand),
        stochastic=draw.stochastic,
        row_factor=row_factor,
        column_factor=column_factor,
    )


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    row_scale: torch.Tensor | None = None,
    column_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
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
    kernel = native.dequantize if native.available() else reference.dequantize
    return kernel(sums, row_scale, column_scale, bias)


def _with_new_strides(codes: torch.Tensor) -> torch.Tensor:
    """The same codes, with the stride of a new tensor along an axis of length 1.

    `torch._int_mm` reads that stride, which should not matter, and computes wrong sums for a column viewed as a
    row (torch 2.13 on CPU).
    """
    return codes.contiguous().view(-1).view(codes.shape) if 1 in codes.shape else codes
