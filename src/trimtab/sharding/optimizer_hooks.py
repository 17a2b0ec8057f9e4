"""Keep the slices left out of training unchanged: no weight decay, no momentum, no update of optimizer state.

This works with any elementwise optimizer of `torch.optim` without registration: torch calls these hooks around every
step of every optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.sharding.cut import Cut
from trimtab.sharding.unit_block import ShardedModel, UnitBlock, UnitTensor

_PARAMETER = None
"""Key of the parameter itself, among the keys of its optimizer states."""


class OptimizerHooks:
    """Hooks on the optimizer steps of a converted model's units, for the lifetime of this object.

    Frozen slices are saved before a step and restored after it; then `stepped` is called. With several optimizers
    it is called once for each step of the first one.
    """

    def __init__(self, sharded: ShardedModel, stepped: Callable[[], None]) -> None:
        self._sharded, self._stepped = sharded, stepped
        self._first: weakref.ref[Optimizer] | None = None
        self._saved: dict[int, list[tuple[Cut, UnitTensor, Any, Tensor]]] = {}
        self._buffers: dict[tuple[int, str, Any], Tensor] = {}
        self._since: set[int] = set()
        """Optimizers that stepped since the first one did."""
        alive = weakref.ref(self)

        def hook(method: str) -> Callable[..., None]:
            def call(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
                hooks = alive()
                if hooks is not None:
                    getattr(hooks, method)(optimizer)

            return call

        for handle in (
            register_optimizer_step_pre_hook(hook("_before")),
            register_optimizer_step_post_hook(hook("_after")),
        ):
            weakref.finalize(self, handle.remove)

    @torch.no_grad()
    def _before(self, optimizer: Optimizer) -> None:
        saved = []
        for block, tensor in self._tensors_of(optimizer):
            cut, parameter = block.learned, tensor.parameter.data
            frozen = None if cut is None else _frozen(cut, tensor, parameter)
            if cut is None or frozen is None or tensor.parameter.grad is None:
                continue
            states = _states(optimizer, tensor)
            for key, value in [(_PARAMETER, parameter), *states.items()]:
                view, dim, index = _frozen(cut, tensor, value) or frozen
                saved.append(
                    (cut, tensor, key, self._copy(view, dim, index, (id(optimizer), tensor.name, key)))
                )
            if not states:
                # Optimizer states created in this step must not include weight decay of frozen weights.
                view, dim, index = frozen
                view.index_fill_(dim, index, 0)
        self._saved[id(optimizer)] = saved
        if not saved:
            self._buffers = {key: buffer for key, buffer in self._buffers.items() if key[0] != id(optimizer)}

    def _copy(self, view: Tensor, dim: int, index: Tensor, place: tuple[int, str, Any]) -> Tensor:
        """A copy of the frozen slices in a reused buffer: allocating one each step would take longer than the copy."""
        shape = (*view.shape[:dim], len(index), *view.shape[dim + 1 :])
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != shape or buffer.dtype != view.dtype:
            buffer = self._buffers[place] = view.new_empty(shape)
        return torch.index_select(view, dim, index, out=buffer)

    @torch.no_grad()
    def _after(self, optimizer: Optimizer) -> None:
        for cut, tensor, key, values in self._saved.pop(id(optimizer), []):
            value = tensor.parameter.data if key is _PARAMETER else optimizer.state[tensor.parameter][key]
            frozen = _frozen(cut, tensor, value)
            assert frozen is not None
            view, dim, index = frozen
            view.index_copy_(dim, index, values)
        if not self._tensors_of(optimizer):
            return
        first = None if self._first is None else self._first()
        if first is None or id(optimizer) in self._since:  # the first one is gone, or no longer steps
            self._first, first = weakref.ref(optimizer), optimizer
        self._since.add(id(optimizer))
        if first is optimizer:
            self._since.clear()
            self._stepped()

    def _tensors_of(self, optimizer: Optimizer) -> list[tuple[UnitBlock, UnitTensor]]:
        """The unit tensors that this optimizer updates."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [pair for pair in self._sharded.tensors() if id(pair[1].parameter) in held]


def _states(optimizer: Optimizer, tensor: UnitTensor) -> dict[Any, Tensor]:
    shape = tensor.parameter.shape
    states = optimizer.state.get(tensor.parameter, {})
    return {key: value for key, value in states.items() if isinstance(value, Tensor) and value.shape == shape}


def _frozen(cut: Cut, tensor: UnitTensor, value: Tensor) -> tuple[Tensor, int, Tensor] | None:
    return cut.frozen(tensor, value, into=tensor.into)
