"""Let a forward pass that names the width or the number of all heads work on those of one rank.

`y.view(batch, places, width)` and `qkv.split(width, dim=2)`, with the width of the block's input, are how most small
GPTs and vision transformers are written. Inside a block such a size is replaced by that of this rank's heads. Which one
it is follows from the tensor: in the unsplit module the same call has the same sizes for a tensor with all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trimtab.model_state import attach_state, state_of
from trimtab.sharding.unit_block import UnitBlock

_VIEWS: set[Any] = {Tensor.view, Tensor.reshape, torch.reshape}
_SPLITS: set[Any] = {Tensor.split, torch.split, Tensor.split_with_sizes, torch.split_with_sizes}
_UNFLATTENS: set[Any] = {Tensor.unflatten, torch.unflatten}


def adapt_shapes(block: UnitBlock, widths: Sequence[int], totals: Sequence[int]) -> None:
    """Replace sizes in the forward pass of the block's module.

    Args:
        widths: of one unit: entries of each part of a projection's outputs, and numbers of heads.
        totals: of one unit: entries of all parts of each projection's outputs.
    """
    parent = block.parent
    state = attach_state(parent)
    state.local_shapes = _LocalShapes(block, sorted({*widths}), {*totals})
    parent.__class__ = type(f"Shaped{type(parent).__name__}", (_Shaped, type(parent)), {})


class _Shaped(nn.Module):
    """Mixed into an attention module whose forward pass names sizes of all heads."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with state_of(self).local_shapes:
            return super().forward(*args, **kwargs)


class _LocalShapes(TorchFunctionMode):
    """While active, sizes of all heads are replaced by those of this rank's, for tensors that have these."""

    def __init__(self, block: UnitBlock, widths: Sequence[int], totals: set[int]) -> None:
        super().__init__()
        self._block, self._widths, self._totals = block, widths, totals
        self._known: dict[Any, tuple[int, ...] | None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        block = self._block
        if block.sharded.inside is not block or block.verifying == "all units":
            return func(*args, **kwargs)
        if func in _VIEWS and not kwargs and len(args) > 1:
            sizes = _sizes(args[1:])
            local = None if sizes is None else self._cached(_view, args[0], sizes)
            args = args if local is None else (args[0], local)
        elif func in _UNFLATTENS and not kwargs and len(args) == 3:
            sizes = _sizes(args[2:])
            local = None if sizes is None else self._cached(_unflatten, args[0].shape[args[1]], sizes)
            args = args if local is None else (*args[:2], local)
        elif func in _SPLITS and len(args) > 1:
            dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
            length = args[0].shape[dim]
            sizes = _sizes(args[1:2])
            local = None if sizes is None else self._split(length, sizes)
            if local is not None:
                args = (args[0], local if isinstance(args[1], (tuple, list)) else local[0], *args[2:])
        return func(*args, **kwargs)

    def _cached(self, rule: Callable[..., Any], of: Any, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        shape = tuple(of.shape) if isinstance(of, Tensor) else of
        computing = max(1, self._block.computing)
        key = (shape, sizes, computing)
        if key not in self._known:
            if len(self._known) > 1000:  # sequences of many lengths
                self._known.clear()
            self._known[key] = rule(shape, sizes, self._block.units, computing, self._widths)
        return self._known[key]

    def _split(self, length: int, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        units, computing = self._block.units, max(1, self._block.computing)
        if length not in {total * computing for total in self._totals}:
            return None
        if any(size * computing % units for size in sizes):
            return None
        return tuple(size * computing // units for size in sizes)


def _sizes(args: Sequence[Any]) -> tuple[int, ...] | None:
    """The sizes of a call, given as a sequence or one by one; None if they are something else (a type)."""
    sizes = tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else tuple(args)
    return sizes if all(isinstance(size, int) for size in sizes) else None


def _unflatten(
    length: int, sizes: tuple[int, ...], units: int, computing: int, widths: Sequence[int]
) -> tuple[int, ...] | None:
    local = _view((length,), sizes, units, computing, widths)
    return (
        local
        if local is None or -1 not in sizes
        else tuple(-1 if size == -1 else each for size, each in zip(sizes, local, strict=True))
    )


def _view(
    shape: tuple[int, ...], sizes: tuple[int, ...], units: int, computing: int, widths: Sequence[int]
) -> tuple[int, ...] | None:
    """The sizes of a view of a tensor with some of the units, of which `sizes` are those of a tensor with all.

    None if the tensor does not depend on the units, or its view does not.
    """
    if computing == units or 0 in shape or (-1 not in sizes and prod(sizes) == prod(shape)):
        return None
    best: tuple[int, tuple[int, ...]] | None = None
    for axis, length in enumerate(shape):
        if length % computing or not any(length == width * computing for width in widths):
            continue
        whole = (*shape[:axis], length // computing * units, *shape[axis + 1 :])
        full = _resolved(sizes, prod(whole))
        groups = None if full is None else _groups(whole, full)
        if full is None or groups is None:
            continue
        start, end = next((b for a, b in groups if a[0] <= axis < a[1]), (0, 0))
        for place in range(start, end):
            if full[place] % units or not any(full[place] == width * units for width in widths):
                continue
            local = (*full[:place], full[place] // units * computing, *full[place + 1 :])
            # Of several, the one that joins fewest axes, and then the last: heads come after samples and places.
            if best is None or len(groups) >= best[0]:
                best = len(groups), local
            break
    return None if best is None else best[1]


def _resolved(sizes: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    """Sizes with -1 replaced; None if they do not fit."""
    if -1 not in sizes:
        return sizes if prod(sizes) == count else None
    known = prod(size for size in sizes if size != -1)
    return (
        tuple(count // known if size == -1 else size for size in sizes)
        if known and count % known == 0
        else None
    )


def _groups(
    shape: tuple[int, ...], sizes: tuple[int, ...]
) -> list[tuple[tuple[int, int], tuple[int, int]]] | None:
    """The shortest runs of axes of both that have as many entries, in order: what a view joins and splits."""
    groups, a, b = [], 0, 0
    while a < len(shape) or b < len(sizes):
        start = a, b
        left = right = 1
        if a < len(shape):
            left, a = shape[a], a + 1
        if b < len(sizes):
            right, b = sizes[b], b + 1
        while left != right:
            if left < right and a < len(shape):
                left, a = left * shape[a], a + 1
            elif b < len(sizes):
                right, b = right * sizes[b], b + 1
            elif a < len(shape):
                left, a = left * shape[a], a + 1
            else:
                return None
        groups.append(((start[0], a), (start[1], b)))
    return groups
