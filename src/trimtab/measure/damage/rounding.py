"""The expected squared error of every element when `trimtab.precision` rounds a tensor.

With stochastic rounding that is S² f (1 − f), where S is the distance between the two neighbors of a value and f
its position between them; with rounding to nearest it is the squared error itself.
"""

from __future__ import annotations

from typing import Literal

import torch

from trimtab.precision.reference import FP8, LEAST_MAGNITUDE

Axis = Literal["rows", "columns", "whole"]

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def of_weight(weight: torch.Tensor, precision: str) -> torch.Tensor:
    """In any precision, for a weight whose first axis is the outputs."""
    if precision in HALF:
        return half(weight, precision)
    if precision == "int8":
        return int8(weight.flatten(1), "rows")
    return tf32(weight) if precision == "tf32" else fp8(weight, torch.float8_e4m3fn, stochastic=False)


def half(values: torch.Tensor, name: str, *, scaled: bool = False) -> torch.Tensor:
    """To bf16 or fp16; `scaled` like gradients in fp16, by the power of two that brings the largest value near 1."""
    values = values.float()
    by = torch.ones((), device=values.device)
    if scaled and name == "fp16" and values.numel():
        by = torch.ldexp(by, -torch.frexp(values.abs().amax()).exponent.clamp(-120, 120))
    return ((values * by).to(HALF[name]).float() / by - values).square()


def tf32(values: torch.Tensor) -> torch.Tensor:
    """To 10 bits of fraction, as tensor cores read fp32."""
    values = values.float().contiguous()
    kept = ((values.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)
    return (kept - values).square()


def int8(matrix: torch.Tensor, axis: Axis, factor: torch.Tensor | None = None) -> torch.Tensor:
    """With `trimtab.precision.int8.quantize`, in the units of the matrix.

    Args:
        factor: multiplies the matrix before rounding and divides the result after it.
    """
    factor = torch.ones((), device=matrix.device) if factor is None else factor
    scaled = matrix.float() * factor
    step = int8_scales(scaled, axis)
    part = scaled / step.clamp_min(1e-37)
    part = part - part.floor()
    variance = (step / factor).square() * (part * (1 - part))
    # With a step or factor of 0 values are encoded as zeros.
    return torch.where((step > 0) & (factor > 0), variance, matrix.float().square())


def int8_scales(matrix: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The step of each row or column (or of the whole matrix), broadcastable to it; 0 where all values encode to 0."""
    size = matrix.abs()
    if matrix.numel() == 0:
        return matrix.new_zeros((1, 1))
    axes = {"rows": (1,), "columns": (0,), "whole": (0, 1)}[axis]
    largest = size.amax(axes, keepdim=True)
    return torch.where(largest >= LEAST_MAGNITUDE, largest / 127, 0.0)


def fp8(values: torch.Tensor, dtype: torch.dtype, *, stochastic: bool) -> torch.Tensor:
    """To an 8-bit float type with one scale for the whole tensor."""
    top, mantissa, least = FP8[dtype]
    values = values.float()
    largest = values.abs().amax() if values.numel() else values.new_zeros(())
    scale = torch.where(largest >= LEAST_MAGNITUDE, largest / top, torch.ones_like(largest))
    v = values / scale
    if not stochastic:
        return ((v.clamp(-top, top).to(dtype).float() - v) * scale).square()
    exponent = torch.frexp(v.abs().clamp_min(2.0**least)).exponent - 1
    step = torch.ldexp(torch.ones_like(v), exponent - mantissa)
    part = v.abs() / step
    part = part - part.floor()
    return (step * scale).square() * (part * (1 - part))
