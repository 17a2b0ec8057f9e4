"""Tensors that represent a whole of which each rank has a part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_METADATA = frozenset(
    ("shape", "device", "dtype", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized")
)  # fmt: skip
_SIZES = frozenset((Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point))


class DividedTensor(Tensor):
    """Has the shape of the whole. Functions that `_apart` does not know get all of it, on every rank: a collective."""

    local: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = cls._function(func, args, kwargs)
        if result is not NotImplemented:
            return result
        args, kwargs = tree_map(lambda v: v.whole() if isinstance(v, DividedTensor) else v, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"{func}: a {cls.__name__} was used inside torch; call its .whole() first")

    @classmethod
    def _function(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a function without gathering; NotImplemented if there is none."""
        if not args or not isinstance(args[0], cls):
            return NotImplemented
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute == "requires_grad":
            return args[0].local.requires_grad
        if func in _SIZES or attribute in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return args[0]._apart(func, args[1:], kwargs)

    def _apart(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a function of this tensor gives without gathering; NotImplemented if it needs the whole."""
        return NotImplemented

    def whole(self) -> Tensor:
        """All of it. Every rank calls it."""
        raise NotImplementedError
