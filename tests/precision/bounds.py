"""How far a product may be from the exact one, element by element, by its rounding alone."""

from __future__ import annotations

import torch

RELATIVE = {"fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-9, "fp16": 2.0**-12}
"""Largest relative error of rounding to nearest (half the last place)."""


def product_bound(
    a: torch.Tensor, b: torch.Tensor, a_error: torch.Tensor, b_error: torch.Tensor, last: float
) -> torch.Tensor:
    """Bound of |â b̂ − a b| where |â − a| ≤ a_error and so on, and the result has the relative error `last`.

    Sums are in fp32, which adds at most a rounding for each term.
    """
    size, longer = a.abs(), b.abs()
    of_operands = a_error @ longer + size @ b_error + a_error @ b_error
    largest = (size + a_error) @ (longer + b_error)
    return of_operands + largest * (last + (a.shape[1] + 2) * 2.0**-24) + 1e-30


def half_error(x: torch.Tensor, name: str) -> torch.Tensor:
    """Of rounding x to a type with that name. fp16 has a smallest step, 2⁻²⁴ of a tensor scaled to 1."""
    least = x.abs().max() * 2.0**-23 if name == "fp16" else torch.zeros(())
    return x.abs() * RELATIVE[name] * 2 + least


def int8_step(x: torch.Tensor, axis: str) -> torch.Tensor:
    """The distance between codes, which stochastic rounding errs by less than."""
    size = x.abs()
    if axis == "rows":
        step = size.amax(1, keepdim=True)
    elif axis == "columns":
        step = size.amax(0, keepdim=True)
    else:
        step = size.amax()
    return (step / 127 * (1 + 1e-5)).expand(x.shape)
