"""Where the steps of a training loop begin and end, seen from a model and its optimisers: the loop needs no line."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from trimtab.model_state import JobHook

if TYPE_CHECKING:
    from torch import nn


class Follower(Protocol):
    """What is told of the steps."""

    def between(self, model: nn.Module) -> None:
        """A step is over and the next forward pass of training is about to begin."""

    def begins(self) -> None:
        """A step begins."""

    def ends(self) -> None:
        """It ends here, or at the next call, where a script has several optimisers."""


class TrainingSteps:
    """Tells a follower of the steps of a model, for as long as the model lives.

    A step is one or more forward passes in training and then a step of each optimiser that has its parameters.
    Passes without gradients, and repetitions by activation checkpointing, are none.
    """

    def __init__(self, model: nn.Module, parameters: set[int], follower: Follower) -> None:
        self._parameters, self._follower = parameters, weakref.ref(follower)
        self._known: list[weakref.ref[Optimizer]] = []
        self._foreign: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._open = self._stepped = False
        # A compiled model calls it between its graphs: what it does is not for tracing.
        model.register_forward_pre_hook(JobHook(torch.compiler.disable(self._before_forward)))
        alive = weakref.ref(self)

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            steps = alive()
            if steps is not None:
                steps._after_optimizer(optimizer)

        weakref.finalize(model, register_optimizer_step_post_hook(after_step).remove).atexit = False

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those seen so far, in the order of their first steps: the same on every rank."""
        return [optimizer for known in self._known if (optimizer := known()) is not None]

    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        follower = self._follower()
        repeated = torch._C._current_graph_task_id() != -1
        if follower is None or repeated or not module.training or not torch.is_grad_enabled():
            return
        if self._stepped:
            self._stepped = False
            follower.between(module)
        if not self._open:
            self._open = True
            follower.begins()

    def _after_optimizer(self, optimizer: Optimizer) -> None:
        if not any(known() is optimizer for known in self._known):
            if optimizer in self._foreign or not self._updates(optimizer):
                self._foreign.add(optimizer)
                return
            self._known.append(weakref.ref(optimizer))
        follower = self._follower()
        if follower is not None:
            follower.ends()
        self._stepped, self._open = True, False

    def _updates(self, optimizer: Optimizer) -> bool:
        return any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"])
