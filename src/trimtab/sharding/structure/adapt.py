"""Let a forward pass that was written for all heads compute those of one rank.

Most modules split heads by their width and work as they are. Others read the number of heads, or the width of all of
them, from an attribute or from their configuration, add a bias with a row for each head, or have parameters with an
entry for each head. Which of these a module needs is found by trial (`trimtab.sharding.structure.check`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trimtab.model_state import attach_state, state_of
from trimtab.sharding.group import enter
from trimtab.sharding.unit_block import UnitBlock

_ADDITIONS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
_SIZES = ("dim", "size", "width")


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """What is changed of a module while it computes the heads of one rank."""

    counts: bool = False
    """Attributes that hold the number of heads."""

    widths: bool = False
    """Attributes that hold the width of all heads."""

    config: bool = False
    """The number of heads in the module's `config`, of which it gets a copy."""

    bias: bool = False
    """Biases with a row for each head: each rank uses the rows of its heads."""

    entries: bool = False
    """The module's own parameters and buffers with an entry for each head: each rank uses those of its heads.

    Attention sinks, temperatures, the slopes of ALiBi, biases of relative places.
    """

    shapes: bool = False
    """Sizes of all heads in views and splits: the width of the input, or a number that is no attribute."""


NONE = Adaptation()
COUNTS = Adaptation(counts=True)
ADAPTATIONS = (
    NONE,
    Adaptation(bias=True),
    COUNTS,
    Adaptation(counts=True, bias=True),
    Adaptation(counts=True, widths=True),
    Adaptation(counts=True, config=True),
    Adaptation(counts=True, widths=True, config=True, bias=True),
    Adaptation(entries=True),
    Adaptation(counts=True, widths=True, config=True, entries=True),
    Adaptation(shapes=True),
    Adaptation(shapes=True, entries=True),
    Adaptation(shapes=True, bias=True),
)
"""From the least change on; the first that verifies is used."""


def local_widths(
    parent: nn.Module,
    adaptation: Adaptation,
    units: int,
    heads: int,
    width: int,
    fixed: tuple[str | None, ...],
) -> Iterator[tuple[Any, str, int]]:
    """The attributes that depend on how many units a rank computes, each with its value for one unit.

    Args:
        heads: in one unit.
        width: of one unit, as an input of the last projection.
        fixed: names of attributes that stay as they are.
    """
    for module in parent.modules():
        if isinstance(module, nn.Linear):
            continue
        holders: list[Any] = [module] if adaptation.counts else []
        if adaptation.config and hasattr(module, "config"):
            module.config = copy.copy(module.config)
            holders.append(module.config)
        for holder in holders:
            for name, value in list(vars(holder).items()):
                if type(value) is not int or name in fixed:
                    continue
                if "head" in name and not any(word in name for word in _SIZES):
                    if value == units * heads:
                        yield holder, name, heads
                    elif value == units:
                        yield holder, name, 1
                elif adaptation.widths and value == units * width and holder is module:
                    yield holder, name, width


def align_biases(block: UnitBlock) -> None:
    """Use only the rows of this rank's heads of biases that have one for each head."""
    parent = block.parent
    attach_state(parent).aligned_block = block
    parent.__class__ = type(f"Aligned{type(parent).__name__}", (_Aligned, type(parent)), {})


def select_entries(block: UnitBlock) -> None:
    """Use only the entries of this rank's heads of the parent's own parameters and buffers that have one for each head.

    Each rank keeps them whole: they are small, and the gradient of a parameter is summed over the ranks.
    """
    parent, heads = block.parent, block.units * block.heads_per_unit
    own = [*parent.named_parameters(recurse=False), *parent.named_buffers(recurse=False)]
    axes = {name: list(value.shape).index(heads) for name, value in own if heads in value.shape}
    attach_state(parent).aligned_block = block
    # A property is looked up before the parameter of that name.
    parent.__class__ = type(
        f"Entries{type(parent).__name__}",
        (type(parent),),
        {name: _entries(name, axis) for name, axis in axes.items()},
    )


def _entries(name: str, axis: int) -> property:
    def selected(module: nn.Module) -> Tensor | None:
        block: UnitBlock = state_of(module).aligned_block
        value = module._parameters[name] if name in module._parameters else module._buffers[name]
        if value is None or block.sharded.inside is not block or block.verifying == "all units":
            return value
        value = enter(value, block.group) if value.requires_grad else value
        return value.index_select(axis, _heads(block, value.device))

    return property(selected)


def _heads(block: UnitBlock, device: torch.device) -> Tensor:
    """The heads that this rank computes; one of another rank if it computes none, since attention needs one."""
    units = torch.as_tensor(block.computed or [0], device=device)
    heads = block.heads_per_unit
    return (units.unsqueeze(1) * heads + torch.arange(heads, device=device)).flatten()


def share_parameters(module: nn.Module, names: tuple[str, ...], block: UnitBlock) -> None:
    """Sum the gradients of some of a module's own parameters over the ranks: each has only that of its units."""
    state = attach_state(module)
    if state.shared_parameters is None:
        state.shared_parameters = {}
        module.__class__ = type(f"Shared{type(module).__name__}", (_Shared, type(module)), {})
    for name in names:
        state.shared_parameters.setdefault(name, []).append(block)


class _Aligned(nn.Module):
    """Mixed into an attention module whose scores get a bias by head."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _AlignBiases(state_of(self).aligned_block):
            return super().forward(*args, **kwargs)


class _Shared(nn.Module):
    """Mixed into a module with parameters that a block's units use: these pass through the entrance of the block.

    In the module that computes the block that is so in all of its forward pass, in another one in calls from inside the
    block. Elsewhere every rank has the whole gradient.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names = []
        try:
            for name, blocks in state_of(self).shared_parameters.items():
                block = next((b for b in blocks if b.parent is self or b.sharded.inside is b), None)
                if block is not None:  # in front of the parameters, where attributes are looked up first
                    self.__dict__[name] = enter(self._parameters[name], block.group)  # type: ignore[arg-type]
                    names.append(name)
            return super().forward(*args, **kwargs)
        finally:
            for name in names:
                self.__dict__.pop(name, None)


class _AlignBiases(TorchFunctionMode):
    """While active, what is added to the scores of some heads is reduced to the rows of these heads."""

    def __init__(self, block: UnitBlock) -> None:
        super().__init__()
        self._block = block

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._block.sharded.inside is self._block:
            if func is F.scaled_dot_product_attention:
                mask = kwargs["attn_mask"] if "attn_mask" in kwargs else (*args, None, None, None, None)[3]
                if isinstance(mask, Tensor):
                    kwargs = {**kwargs, "attn_mask": self._aligned(args[0], mask)}
                    args = (*args[:3], *args[4:]) if len(args) > 3 else args
                    assert len(args) == 3
            elif func in _ADDITIONS and len(args) == 2 and all(isinstance(a, Tensor) for a in args):
                scores, bias = args
                if bias.ndim == 3 or bias.shape[:1] == (1,):
                    args = (scores, self._aligned(scores, bias))
        return func(*args, **kwargs)

    def _aligned(self, scores: Tensor, bias: Tensor) -> Tensor:
        block = self._block
        heads, computing = block.heads_per_unit, max(1, block.computing)
        if scores.ndim != 4 or scores.shape[1] != computing * heads:
            return bias
        if bias.ndim < 3 or bias.shape[-3] != block.units * heads:
            return bias
        # The gradient of the bias is that of this rank's heads.
        entered = enter(bias, block.group) if bias.requires_grad else bias
        return entered.index_select(bias.ndim - 3, _heads(block, bias.device))
