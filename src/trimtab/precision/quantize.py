"""8-bit operands on CPU: codes, scales, exact sums of products, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from trimtab.precision import native, reference

if TYPE_CHECKING:
    from trimtab.precision.draw import Draw, Operand

Axis = Literal["rows", "columns", "whole"]
"""What shares a scale: each row, each column, or the whole matrix."""

LONGEST_SUM = 1 << 17
"""Products of two codes that an int32 surely holds the sum of: 2³¹ / 127², rounded down to a power of two."""


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

    With stochastic rounding the mean of codes · scale is the value itself. A row (column, matrix) that
    holds NaN or Inf has the scale NaN, so that its products are NaN too. The matrix may be transposed.

    Returns:
        int8 of the values' shape and strides; fp32, one for each row, column, or one in all.
    """
    if not values.is_contiguous() and values.t().is_contiguous():
        transposed: dict[Axis, Axis] = {"rows": "columns", "columns": "rows", "whole": "whole"}
        codes, scales = quantize(
            values.t(), transposed[axis], draw, operand, row_factor=column_factor, column_factor=row_factor
        )
        return codes.t(), scales
    values = values.detach().to(torch.float32).contiguous()
    make = native.quantize if native.available() else reference.quantize
    return make(
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
    """fp32: (a @ b) · row_scale · column_scale + bias, of int8 codes with exact int32 sums inside."""
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
        sums = torch._int_mm(_with_own_strides(a), _with_own_strides(b))
    make = native.dequantize if native.available() else reference.dequantize
    return make(sums, row_scale, column_scale, bias)


def _with_own_strides(codes: torch.Tensor) -> torch.Tensor:
    """The same codes; along an axis of length 1, the stride a fresh tensor would have.

    `torch._int_mm` reads that stride although nothing else does, and gives wrong sums for a column
    seen as a row (torch 2.13 on CPU).
    """
    return codes.contiguous().view(-1).view(codes.shape) if 1 in codes.shape else codes
