"""The loss scale of the backward pass that runs: by it, gradients are larger than they would be without a GradScaler.

What is kept from one step for the next (error feedback) needs it, since a GradScaler changes its scale between steps.
torch offers no other place to learn it: `GradScaler.scale` is wrapped, and the loss that it returns says when its
backward pass begins.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.utils._pytree import tree_leaves


class _Running:
    scale: torch.Tensor | None = None


def running_loss_scale() -> torch.Tensor | None:
    """The scale of the loss whose backward pass runs; None if it was not scaled."""
    return _Running.scale


def observe_loss_scales() -> None:
    """Observe every GradScaler from now on; may be called again."""
    original = GradScaler.scale
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def scale(self: GradScaler, outputs: Any) -> Any:
        scaled: Any = original(self, outputs)
        if self.is_enabled() and self._scale is not None:
            factor = self._scale.detach().clone()  # the scaler changes its own in place
            for loss in tree_leaves(scaled):
                if isinstance(loss, torch.Tensor) and loss.requires_grad:
                    loss.register_hook(lambda _gradient: _begin(factor))
        return scaled

    GradScaler.scale = scale  # type: ignore[method-assign]


def _begin(scale: torch.Tensor) -> None:
    _Running.scale = scale
    torch.autograd.Variable._execution_engine.queue_callback(_end)


def _end() -> None:
    _Running.scale = None
