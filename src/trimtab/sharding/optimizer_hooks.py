"""What is left out stays as it is: no decay, no momentum, no moment of it moves while its gradient is zero.

Works with any elementwise optimizer of `torch.optim` and needs to be told of none: torch calls these hooks
around every step of all of them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.sharding.projection import InProjection

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from trimtab.sharding.cut import Cut
    from trimtab.sharding.unit_block import ShardedModel, UnitBlock, UnitTensor

_PARAMETER = None
"""Key of a parameter's own data beside those of its states."""


class OptimizerHooks:
    """Sees the optimizer steps of a converted model's units, as long as its blocks live.

    Before a step it puts what is frozen aside, after the step it puts it back, and then calls `stepped`: once for
    each step of the optimizer that came first, where there are several.
    """

    def __init__(self, sharded: ShardedModel, stepped: Callable[[], None]) -> None:
        self._sharded, self._stepped = sharded, stepped
        self._first: weakref.ref[Optimizer] | None = None
        self._aside: dict[int, list[tuple[Cut, UnitTensor, Any, Tensor]]] = {}
        self._room: dict[tuple[int, str, Any], Tensor] = {}
        self._since: set[int] = set()
        """Optimizers that stepped since the first one did."""
        alive = weakref.ref(self)

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            hooks = alive()
            if hooks is not None:
                hooks._before(optimizer)

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            hooks = alive()
            if hooks is not None:
                hooks._after(optimizer)

        handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
        for handle in handles:
            weakref.finalize(self, handle.remove)

    @torch.no_grad()
    def _before(self, optimizer: Optimizer) -> None:
        aside = []
        for block, tensor in self._of(optimizer):
            cut, parameter = block.learned, tensor.parameter.data
            frozen = None if cut is None else _frozen(cut, tensor, parameter)
            if cut is None or frozen is None or tensor.parameter.grad is None:
                continue
            states = _states(optimizer, tensor)
            for key, value in [(_PARAMETER, parameter), *states.items()]:
                view, dim, index = _frozen(cut, tensor, value) or frozen
                aside.append(
                    (cut, tensor, key, self._put(view, dim, index, (id(optimizer), tensor.name, key)))
                )
            if not states:
                # States that are made in this step must not take up the decay of weights that stay.
                view, dim, index = frozen
                view.index_fill_(dim, index, 0)
        self._aside[id(optimizer)] = aside
        if not aside:
            self._room = {place: room for place, room in self._room.items() if place[0] != id(optimizer)}

    def _put(self, view: Tensor, dim: int, index: Tensor, place: tuple[int, str, Any]) -> Tensor:
        """A copy of what is frozen, where the last one was: new memory each step would take longer than the copy."""
        shape = (*view.shape[:dim], len(index), *view.shape[dim + 1 :])
        room = self._room.get(place)
        if room is None or room.shape != shape or room.dtype != view.dtype:
            room = self._room[place] = view.new_empty(shape)
        return torch.index_select(view, dim, index, out=room)

    @torch.no_grad()
    def _after(self, optimizer: Optimizer) -> None:
        for cut, tensor, key, kept in self._aside.pop(id(optimizer), []):
            value = tensor.parameter.data if key is _PARAMETER else optimizer.state[tensor.parameter][key]
            frozen = _frozen(cut, tensor, value)
            assert frozen is not None
            view, dim, index = frozen
            view.index_copy_(dim, index, kept)
        if not self._of(optimizer):
            return
        first = None if self._first is None else self._first()
        if first is None or id(optimizer) in self._since:  # the first has gone, or steps no more
            self._first, first = weakref.ref(optimizer), optimizer
        self._since.add(id(optimizer))
        if first is optimizer:
            self._since.clear()
            self._stepped()

    def _of(self, optimizer: Optimizer) -> list[tuple[UnitBlock, UnitTensor]]:
        """The tensors that this optimizer updates."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [pair for pair in self._sharded.tensors() if id(pair[1].parameter) in held]


def _states(optimizer: Optimizer, tensor: UnitTensor) -> dict[Any, Tensor]:
    shape = tensor.parameter.shape
    states = optimizer.state.get(tensor.parameter, {})
    return {key: value for key, value in states.items() if isinstance(value, Tensor) and value.shape == shape}


def _frozen(cut: Cut, tensor: UnitTensor, value: Tensor) -> tuple[Tensor, int, Tensor] | None:
    return cut.frozen(tensor, value, into=isinstance(tensor.module, InProjection))
