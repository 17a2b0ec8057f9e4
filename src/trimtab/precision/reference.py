"""8-bit operands in plain PyTorch: the oracle of the C++ and Triton kernels, to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trimtab.random_bits import absorb, uniform16

if TYPE_CHECKING:
    from trimtab.precision.quantize import Axis

LEAST_MAGNITUDE = 2.0**-100
"""Below this magnitude a row counts as zeros: its reciprocal would leave fp32's range."""


def quantize(
    values: torch.Tensor,
    axis: Axis,
    *,
    key: int,
    stochastic: bool,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (int8) and scales (fp32) of an fp32 matrix; see `trimtab.precision.quantize.quantize`."""
    if row_factor is not None:
        values = values * row_factor[:, None]
    if column_factor is not None:
        values = values * column_factor
    size = values.abs()
    if axis == "rows":
        largest = size.amax(1, keepdim=True)
    elif axis == "columns":
        largest = size.amax(0, keepdim=True)
    else:
        largest = size.amax().reshape(1, 1)
    finite = largest.isfinite()
    some = finite & (largest >= LEAST_MAGNITUDE)
    # The reciprocal of 127 is rounded to fp32 first, as the kernels have it.
    scales = torch.where(some, largest * torch.tensor(127.0).reciprocal().to(largest.device), 0.0)
    scales = torch.where(finite, scales, torch.nan)
    # A tensor over a tensor: a number over one would be rounded twice, as its reciprocal first.
    inverse = torch.where(some, torch.full_like(largest, 127.0) / largest, 0.0)
    offsets = rounding_offsets(values, key) if stochastic else 0.5
    codes = (values * inverse + offsets).floor().clamp(-127, 127)
    codes = torch.where(some, codes, 0.0).to(torch.int8)
    return codes, scales.flatten()


FP8: dict[torch.dtype, tuple[float, int, int]] = {
    torch.float8_e4m3fn: (448.0, 3, -6),
    torch.float8_e5m2: (57344.0, 2, -14),
}
"""The largest value, the bits of the mantissa, and the exponent of the smallest normal value."""


def quantize_fp8(
    values: torch.Tensor, dtype: torch.dtype, *, key: int, stochastic: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and the one scale of a finite fp32 matrix."""
    top, mantissa, least = FP8[dtype]
    largest = values.abs().amax()
    some = largest >= LEAST_MAGNITUDE
    scale = torch.where(some, largest * torch.tensor(top).reciprocal().to(largest.device), 0.0)
    v = values * torch.where(some, torch.full_like(largest, top) / largest, 0.0)
    if stochastic:
        size = v.abs()
        exponent = torch.frexp(size.clamp_min(2.0**least)).exponent - 1
        step = torch.ldexp(torch.ones_like(v), exponent - mantissa)
        # Small values are first rounded to fp32's last bit at 2^least, as adding it does.
        size = torch.where(size < 2.0**least, (size + 2.0**least) - 2.0**least, size)
        units = size.double() / step + rounding_offsets(values, key)
        v = torch.copysign((units.floor() * step).to(v.dtype), v)
    return v.clamp(-top, top).to(dtype), scale


def rounding_offsets(values: torch.Tensor, key: int) -> torch.Tensor:
    """What is added before rounding down: `trimtab-lb32`'s 16 bits + ½, × 2⁻¹⁶, row by row."""
    rows, columns = values.shape
    return uniform16(row_keys(key, rows, values.device), columns).to(torch.float32) * 2.0**-16 + 2.0**-17


def row_keys(key: int, rows: int, device: torch.device) -> torch.Tensor:
    """`absorb(key, row)` of each row: int64 holding the 64 bits."""
    signed = [absorb(key, row) for row in range(rows)]
    return torch.tensor([k - (1 << 64) if k >> 63 else k for k in signed], dtype=torch.int64, device=device)


def dequantize(
    sums: torch.Tensor,
    row_scale: torch.Tensor | None,
    column_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """fp32: sum · (row scale · column scale) + bias."""
    scale = torch.ones((1, 1), device=sums.device) if row_scale is None else row_scale[:, None]
    if column_scale is not None:
        scale = scale * column_scale
    values = sums.to(torch.float32) * scale
    return values if bias is None else values + bias
