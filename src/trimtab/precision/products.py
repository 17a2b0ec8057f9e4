"""The three matrix products of an operator, in one precision each.

With input x (m × k), weight w (n × k) and output gradient g (m × n):

    forward       y  = x wᵀ
    grad_input    gx = g w
    grad_weight   gw = gᵀ x

An implementation turns x and w into *operands*, tuples of tensors in its own precision, once in the forward
pass; backward saves operands instead of x and w. This file holds the implementation for fp32, tf32 and half
types; the 8-bit ones are in `int8` and in `gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab.precision.draw import Draw
from trimtab.precision_names import PrecisionName

Operands = tuple[Tensor, ...]

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Sizes(NamedTuple):
    """Sizes of the matrices without the padding that operands may have."""

    m: int
    n: int
    k: int


@dataclass
class ColumnTotals:
    """The sums of the output gradient's columns, which are the bias's gradient: requested from whoever reads it."""

    parts: Tensor | None = None
    """Rows that sum to the totals; None if nobody computed them."""

    def of(self, g: Tensor) -> Tensor:
        """The totals of this gradient, in fp32."""
        return (g if self.parts is None else self.parts).sum(0, dtype=torch.float32)


class Products(Protocol):
    """The three products in one precision. Weights are passed as w (n × k), in either memory order."""

    def input(self, x: Tensor, draw: Draw, *, backward: bool = True) -> Operands:
        """The operands of x; without `backward`, for the forward pass alone."""

    def weight(self, w: Tensor, draw: Draw, *, backward: bool = True) -> Operands:
        """The operands of w; without `backward`, for the forward pass alone."""

    saves_input: bool
    """Whether x's operands are saved for backward; otherwise x itself is."""

    saves_weight: bool
    """Whether w's operands are saved; otherwise w itself is, which costs no memory, and they are recomputed."""

    def saved(self, operands: Operands) -> Operands:
        """The part of x's or w's operands that backward needs."""
        return operands

    def saved_input(self, x: Tensor, draw: Draw) -> Operands:
        """The part of x's operands that backward needs, made from x."""
        return self.saved(self.input(x, draw))

    def saved_like(self, values: Tensor) -> Operands:
        """Empty tensors with the shapes and dtypes of `saved`, for torch.compile."""

    def forward(
        self, x: Operands, w: Operands, bias: Tensor | None, sizes: Sizes, dtype: torch.dtype
    ) -> Tensor:
        """x wᵀ + bias, in `dtype`."""

    def gradient(self, g: Tensor, draw: Draw, totals: ColumnTotals | None = None) -> Operands:
        """The operands of g, for both products of the backward pass. It may fill in g's totals, if requested."""

    def grad_input(self, g: Operands, w: Operands, sizes: Sizes, dtype: torch.dtype, draw: Draw) -> Tensor:
        """g w, in `dtype`, from w's saved operands."""

    def grad_weight(
        self,
        g: Operands,
        x: Operands,
        sizes: Sizes,
        transposed: bool,
        draw: Draw,
        totals: ColumnTotals | None = None,
    ) -> Tensor:
        """gᵀ x in fp32, from x's saved operands; xᵀ g if `transposed`. It may fill in g's totals, if requested."""


class Float(Products):
    """fp32, tf32 (tensor cores round the fp32 operands), bf16 and fp16, with fp32 accumulation.

    fp16 has its own loss scaling: the gradient is multiplied by the power of two that brings its largest
    magnitude near 1, and the product is divided by it, so that nothing underflows or overflows.
    """

    saves_weight = False

    def __init__(self, name: PrecisionName) -> None:
        self.dtype, self._tf32 = DTYPES.get(name, torch.float32), name == "tf32"
        self.saves_input = self.dtype != torch.float32

    def input(self, x: Tensor, draw: Draw, *, backward: bool = True) -> Operands:
        return (x.to(self.dtype) if self.saves_input else x,)

    def weight(self, w: Tensor, draw: Draw, *, backward: bool = True) -> Operands:
        return (w.to(self.dtype) if self.saves_input else w,)

    def saved_like(self, values: Tensor) -> Operands:
        return (torch.empty_like(values, dtype=self.dtype),)

    def forward(
        self, x: Operands, w: Operands, bias: Tensor | None, sizes: Sizes, dtype: torch.dtype
    ) -> Tensor:
        bias = None if bias is None else bias.to(self.dtype)
        with self.arithmetic():
            return F.linear(x[0].to(self.dtype), w[0].to(self.dtype), bias).to(dtype)

    def gradient(self, g: Tensor, draw: Draw, totals: ColumnTotals | None = None) -> Operands:
        return self.scaled(g)

    def grad_input(self, g: Operands, w: Operands, sizes: Sizes, dtype: torch.dtype, draw: Draw) -> Tensor:
        with self.arithmetic():
            return unscaled(g[0] @ w[0].to(self.dtype), g[1:], dtype)

    def grad_weight(
        self,
        g: Operands,
        x: Operands,
        sizes: Sizes,
        transposed: bool,
        draw: Draw,
        totals: ColumnTotals | None = None,
    ) -> Tensor:
        values = x[0].to(self.dtype)
        a, b = (values.t(), g[0]) if transposed else (g[0].t(), values)
        with self.arithmetic():
            return unscaled(wide_product(a, b), g[1:], torch.float32)

    def scaled(self, g: Tensor) -> Operands:
        """The gradient in this type and, for fp16, the scale to divide its products by."""
        if self.dtype != torch.float16:
            return (g.to(self.dtype),)
        # The power of two stays on the device, without host synchronization. NaN and Inf are kept.
        g = g.float()
        _, exponent = torch.frexp(g.abs().amax() if g.numel() else g.new_zeros(()))
        scale = torch.ldexp(g.new_ones(()), -exponent.clamp(-120, 120))
        return (g * scale).to(self.dtype), scale

    def arithmetic(self) -> AbstractContextManager[None]:
        """Sets whether fp32 products may use tf32."""
        return nullcontext() if self.saves_input else tf32_products(self._tf32)


def unscaled(y: Tensor, scale: Operands, dtype: torch.dtype) -> Tensor:
    """y divided by the scale, if there is one, in `dtype`."""
    return (y.float() / scale[0]).to(dtype) if scale else y.to(dtype)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32; of half types on a GPU directly from the accumulator."""
    if a.dtype != torch.float32 and a.device.type == "cuda" and a.numel() and b.numel():
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


@contextmanager
def tf32_products(tf32: bool) -> Iterator[None]:
    """Allow or forbid tf32 in fp32 products on a GPU, and restore the setting."""
    if not torch.cuda.is_available():
        yield
        return
    backends: Any = torch.backends
    matmul, conv = backends.cuda.matmul, backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    matmul.fp32_precision = conv.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision, conv.fp32_precision = before
