"""Embeddings and attention in half types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from trimtab.precision.products import Half

if TYPE_CHECKING:
    from collections.abc import Callable


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x rounded to a half type and given back in its own; its gradient passes unrounded."""
    result: torch.Tensor = _Rounded.apply(x, dtype)  # type: ignore[no-untyped-call]
    return result


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return g, None


class HalfProducts(TorchFunctionMode):
    """Inside, products of activations (attention, matmul, bmm) take half operands and give back the type
    they were given. Linear layers are not touched.

    fp16's gradient is scaled on its way in, by a power of two, and unscaled on its way out.
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

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self._PRODUCTS:
            return func(*args, **kwargs)
        scale: list[torch.Tensor] = []
        given = next((a.dtype for a in args if isinstance(a, torch.Tensor)), torch.float32)

        def to_half(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            if self.dtype == torch.bfloat16:
                return value.to(self.dtype)
            return _Enter.apply(value, scale)  # type: ignore[no-untyped-call]

        y = func(*map(to_half, args), **{name: to_half(value) for name, value in kwargs.items()})
        if self.dtype == torch.bfloat16:
            return y.to(given)
        return _Leave.apply(y, given, scale)  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    """To fp16; backward divides by the scale that `_Leave` left in `scale`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: list[torch.Tensor]) -> torch.Tensor:
        ctx.scale, ctx.dtype = scale, x.dtype
        return x.to(torch.float16)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (g.float() / ctx.scale[0]).to(ctx.dtype), None


class _Leave(torch.autograd.Function):
    """From fp16; backward scales the gradient so that it fits."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, dtype: torch.dtype, scale: list[torch.Tensor]) -> torch.Tensor:
        ctx.scale = scale
        return y.to(dtype)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        half, by = Half("fp16").scaled(g)
        assert by is not None
        ctx.scale[:] = [by]
        return half, None, None
