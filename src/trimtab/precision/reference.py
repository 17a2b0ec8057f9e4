"""8-bit operands in plain PyTorch: the C++ and Triton kernels match it bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.random_bits import absorb, uniform16

if TYPE_CHECKING:
    from trimtab.precision.int8 import Axis

LEAST_MAGNITUDE = 2.0**-100
"""A row below this magnitude is quantized as zeros: its reciprocal would leave fp32's range."""


def quantize(
    values: Tensor,
    axis: Axis,
    *,
    key: int,
    stochastic: bool,
    row_factor: Tensor | None = None,
    column_factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes (int8) and scales (fp32) of an fp32 matrix; see `trimtab.precision.int8.quantize`."""
    if row_factor is not None:
        values = values * row_factor[:, None]
    if column_factor is not None:
        values = values * column_factor
    size = values.abs()
    largest = size.amax({"rows": (1,), "columns": (0,), "whole": (0, 1)}[axis], keepdim=True)
    finite = largest.isfinite()
    nonzero = finite & (largest >= LEAST_MAGNITUDE)
    # The reciprocal of 127 is rounded to fp32 first, as in the kernels.
    scales = torch.where(
        nonzero, largest * torch.tensor(127.0, dtype=torch.float32).reciprocal().to(largest.device), 0.0
    )
    scales = torch.where(finite, scales, torch.nan)
    # Tensor by tensor: torch divides a number by a tensor through the reciprocal, which rounds twice.
    inverse = torch.where(nonzero, torch.full_like(largest, 127.0) / largest, 0.0)
    offsets = rounding_offsets(values, key) if stochastic else 0.5
    codes = (values * inverse + offsets).floor().clamp(-127, 127)
    codes = torch.where(nonzero, codes, 0.0).to(torch.int8)
    return codes, scales.flatten()


FP8: dict[torch.dtype, tuple[float, int, int]] = {
    torch.float8_e4m3fn: (448.0, 3, -6),
    torch.float8_e5m2: (57344.0, 2, -14),
}
"""Largest value, bits of the mantissa, and exponent of the smallest normal value."""


def quantize_fp8(values: Tensor, dtype: torch.dtype, *, key: int, stochastic: bool) -> tuple[Tensor, Tensor]:
    """Codes and the single scale of a finite fp32 matrix."""
    top, mantissa, least = FP8[dtype]
    largest = values.abs().amax()
    nonzero = largest >= LEAST_MAGNITUDE
    scale = torch.where(
        nonzero, largest * torch.tensor(top, dtype=torch.float32).reciprocal().to(largest.device), 0.0
    )
    v = values * torch.where(nonzero, torch.full_like(largest, top) / largest, 0.0)
    if stochastic:
        size = v.abs()
        exponent = torch.frexp(size.clamp_min(2.0**least)).exponent - 1
        step = torch.ldexp(torch.ones_like(v), exponent - mantissa)
        # Small values are first rounded to fp32's last bit at 2^least, as the kernels do by adding it.
        size = torch.where(size < 2.0**least, (size + 2.0**least) - 2.0**least, size)
        units = size.double() / step + rounding_offsets(values, key)
        v = torch.copysign((units.floor() * step).to(v.dtype), v)
    return v.clamp(-top, top).to(dtype), scale


def rounding_offsets(values: Tensor, key: int) -> Tensor:
    """The offsets added before rounding down: (16 bits of `trimtab-lb32` + ½) × 2⁻¹⁶, row by row."""
    rows, columns = values.shape
    return uniform16(row_keys(key, rows, values.device), columns).to(torch.float32) * 2.0**-16 + 2.0**-17


def row_keys(key: int, rows: int, device: torch.device) -> Tensor:
    """`absorb(key, row)` of each row, as the 64 bits of an int64."""
    signed = [absorb(key, row) for row in range(rows)]
    return torch.tensor([k - (1 << 64) if k >> 63 else k for k in signed], dtype=torch.int64, device=device)


def dequantize(
    sums: Tensor,
    row_scale: Tensor | None,
    column_scale: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """sum · (row scale · column scale) + bias, in fp32."""
    scale = (
        torch.ones((1, 1), dtype=torch.float32, device=sums.device)
        if row_scale is None
        else row_scale[:, None]
    )
    if column_scale is not None:
        scale = scale * column_scale
    values = sums.to(torch.float32) * scale
    return values if bias is None else values + bias
