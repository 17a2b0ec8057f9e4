"""Embeddings and attention in half types (or in fp32, where autocast would lower them)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trimtab.precision.linear import no_autocast
from trimtab.precision.once import refuse_transforms
from trimtab.precision.products import Float


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to a half type, in its own dtype; the gradient passes through unrounded."""
    if not torch.compiler.is_compiling():
        refuse_transforms()
    result: Tensor = _Rounded.apply(x, dtype)  # type: ignore[no-untyped-call]
    return result


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class HalfProducts(TorchFunctionMode):
    """Computes products of activations (attention, matmul, bmm) with half operands.

    Linear layers are not affected. With fp16, gradients are scaled by a power of two before a product's backward
    and unscaled after it.
    """

    _PRODUCTS: ClassVar[frozenset[Callable[..., Any]]] = frozenset(
        {
            F.scaled_dot_product_attention,
            torch.matmul,
            torch.Tensor.matmul,
            torch.Tensor.__matmul__,
            torch.bmm,
            torch.Tensor.bmm,
        }
    )

    def __init__(self, dtype: torch.dtype, result_dtype: Callable[[Tensor], torch.dtype]) -> None:
        """
        Args:
            dtype: of the operands.
            result_dtype: of a product's result, from its first operand.
        """
        super().__init__()
        self.dtype, self.result_dtype = dtype, result_dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self._PRODUCTS or not isinstance(next(iter(args), None), Tensor):
            return func(*args, **kwargs)
        scale: list[Tensor] = []

        def to_half(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            if self.dtype != torch.float16:
                return value.to(self.dtype)
            return _Enter.apply(value, scale)  # type: ignore[no-untyped-call]

        output_dtype = self.result_dtype(args[0])
        with no_autocast(args[0].device.type):
            y = func(*map(to_half, args), **{name: to_half(value) for name, value in kwargs.items()})
        if self.dtype != torch.float16:
            return y.to(output_dtype)
        return _Leave.apply(y, output_dtype, scale)  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    """To fp16; backward divides by the scale that `_Leave` stored in `scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: list[Tensor]) -> Tensor:
        ctx.scale, ctx.dtype = scale, x.dtype
        return x.to(torch.float16)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return (g.float() / ctx.scale[0]).to(ctx.dtype), None


class _Leave(torch.autograd.Function):
    """From fp16; backward scales the gradient to fp16's range."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, dtype: torch.dtype, scale: list[Tensor]) -> Tensor:
        ctx.scale = scale
        return y.to(dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        half, scale = Float("fp16").scaled(g)
        ctx.scale[:] = [scale]
        return half, None, None
