"""Detect where training steps begin and end from a model and its optimizers; the loop needs no extra line."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from trimtab.model_state import JobHook


class StepListener(Protocol):
    """Is notified of steps."""

    def between(self, model: nn.Module) -> None:
        """A step has ended and the next forward pass of training is about to begin."""

    def begins(self) -> None:
        """A step begins."""

    def ends(self) -> None:
        """The step ends here, or at the next call if the script has several optimizers."""


class TrainingSteps:
    """Notifies a listener of the steps of a model, as long as the model lives.

    A step is one or more forward passes in training mode and then a step of each optimizer that has the model's
    parameters. Passes without gradients, and recomputation by activation checkpointing, do not count.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: set[int],
        listener: StepListener,
        *,
        skipped: bool = False,
        first: bool = False,
    ) -> None:
        """
        Args:
            skipped: steps that a GradScaler skips, because a gradient is not finite, count too.
            first: steps begin before the model's other hooks run, such as FSDP2's first all-gather.
        """
        self._parameters, self._listener = parameters, weakref.ref(listener)
        self._known: list[weakref.ref[Optimizer]] = []
        self._foreign: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._open = self._stepped = False
        # A compiled model calls the hook between its graphs; it must not be traced.
        before = JobHook(torch.compiler.disable(self._before_forward))
        model.register_forward_pre_hook(before, prepend=first)
        alive = weakref.ref(self)

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            steps = alive()
            if steps is not None:
                steps._after_optimizer(optimizer)

        weakref.finalize(model, register_optimizer_step_post_hook(after_step).remove).atexit = False
        if skipped:
            weakref.finalize(model, observe_skipped_steps(lambda own: after_step(own, (), {}))).atexit = False

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers so far, in the order of their first steps: the same on every rank."""
        return [optimizer for known in self._known if (optimizer := known()) is not None]

    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        listener = self._listener()
        repeated = torch._C._current_graph_task_id() != -1
        if listener is None or repeated or not in_training_mode(module) or not torch.is_grad_enabled():
            return
        if self._stepped:
            self._stepped = False
            listener.between(module)
        if not self._open:
            self._open = True
            listener.begins()

    def _after_optimizer(self, optimizer: Optimizer) -> None:
        if not any(known() is optimizer for known in self._known):
            if optimizer in self._foreign or not self._updates(optimizer):
                self._foreign.add(optimizer)
                return
            self._known.append(weakref.ref(optimizer))
        listener = self._listener()
        if listener is not None:
            listener.ends()
        self._stepped, self._open = True, False

    def _updates(self, optimizer: Optimizer) -> bool:
        return any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"])


def in_training_mode(model: nn.Module) -> bool:
    """Whether a model, or the model inside DDP, is in training mode.

    Lightning's evaluation leaves the wrapper itself in evaluation mode.
    """
    inner = getattr(model, "module", None) if isinstance(model, DistributedDataParallel) else None
    return model.training if inner is None else inner.training


_skip_observers: list[Callable[[Optimizer], None]] = []


def observe_skipped_steps(observer: Callable[[Optimizer], None]) -> Callable[[], None]:
    """Call `observer` when a GradScaler skips an optimizer's step; returns what ends that.

    torch has no hook for it: `GradScaler.step` is wrapped.
    """
    original = GradScaler.step
    if not hasattr(original, "__wrapped__"):

        @wraps(original)
        def step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            stepped: list[bool] = []
            handle = optimizer.register_step_post_hook(lambda *_: stepped.append(True))
            try:
                result = original(self, optimizer, *args, **kwargs)
            finally:
                handle.remove()
            if not stepped:
                for observe in list(_skip_observers):
                    observe(optimizer)
            return result

        GradScaler.step = step  # type: ignore[method-assign]
    _skip_observers.append(observer)
    return lambda: _skip_observers.remove(observer)
