"""Embeddings and attention in half types (or in fp32, where autocast would lower them)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.precision.devices import autocasts
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


_PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {
        F.scaled_dot_product_attention,
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.mm,
        torch.Tensor.mm,
        torch.bmm,
        torch.Tensor.bmm,
        torch.baddbmm,
        torch.Tensor.baddbmm,
        torch.einsum,
    }
)


def is_product(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a call of torch's API is a product of activations whose precision can be set.

    As under autocast, integers, complex numbers and doubles (positions, say) keep their types.
    """
    if func not in _PRODUCTS:
        return False
    operands = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    types = {operand.dtype for operand in operands if operand.dtype != torch.bool}
    return len(operands) > 1 and bool(types) and types <= _LOWERED_TYPES


_LOWERED_TYPES = {torch.float32, torch.bfloat16, torch.float16}


class HalfProducts(TorchFunctionMode):
    """Computes products of activations (attention, matmul, bmm, einsum) with half operands.

    Linear layers are not affected. With fp16, gradients are scaled by a power of two before a product's backward
    and unscaled after it.
    """

    def __init__(self, dtype: torch.dtype, result_dtype: Callable[[Tensor], torch.dtype]) -> None:
        """
        Args:
            dtype: of the operands.
            result_dtype: of a product's result, from its first operand.
        """
        super().__init__()
        self.dtype, self.result_dtype = dtype, result_dtype
        self._autocast: set[str] = set()

    def __enter__(self) -> HalfProducts:
        self._autocast = {kind for kind in ("cpu", "cuda") if autocasts(kind)}
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_product(func, args, kwargs):
            return func(*args, **kwargs)
        first = next(v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor))
        kind = first.device.type
        if kind in self._autocast and not autocasts(kind):
            return func(
                *args, **kwargs
            )  # the model itself keeps this one from being lowered, as rotary positions
        scale: list[Tensor] = []

        def to_half(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            if self.dtype != torch.float16:
                return value.to(self.dtype)
            return _Enter.apply(value, scale)  # type: ignore[no-untyped-call]

        output_dtype = self.result_dtype(first)
        with no_autocast(kind):
            y = func(*tree_map(to_half, args), **tree_map(to_half, kwargs))
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
