"""What scripts do to weights beside optimizers' steps: load them, or update them by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from trimtab.model_state import JobBound, JobHook

SAMPLE = 64
"""Values of each parameter that are compared."""

BY_HAND, LOOKS = 3, 256
"""Changes by no optimizer after which weights are taken to be updated by hand; and forward passes in which to look: one
change may be that of a script that loads its weights late."""


class LoadedWeights(JobBound):
    """Remembers a model's weights from before `load_state_dict`, until they are asked for."""

    def __init__(self, module: nn.Module, weights: Sequence[torch.Tensor]) -> None:
        self._weights = weights
        self._before: list[torch.Tensor] | None = None
        self._handle = module.register_load_state_dict_pre_hook(JobHook(self._keep))

    def _keep(self, *_loading: Any) -> None:
        if self._before is None:
            self._before = [weight.detach().clone() for weight in self._weights]

    @property
    def pending(self) -> bool:
        """Whether something was loaded."""
        return self._before is not None

    def settle(self, finish: Callable[[], None]) -> bool:
        """Let `finish` do what follows the last step, to the weights from before; returns whether others were loaded.

        They were not where a script evaluates other weights, and then loads its own again.
        """
        before, self._before = self._before, None
        if before is None or all(map(torch.equal, before, self._weights)):
            return False
        weights = [weight.detach() for weight in self._weights]
        loaded = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, before)
        finish()
        torch._foreach_copy_(weights, loaded)
        return True

    def drop(self) -> None:
        """What was loaded is known to be a part of the training."""
        self._before = None

    def end(self) -> None:
        """Look no more."""
        self._handle.remove()
        self.drop()


class HandUpdates:
    """Tells from a few values whether a script updates its weights without an optimizer that torch knows."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights = weights
        self._values: torch.Tensor | None = None
        self._looks = self._changes = 0

    def look(self) -> bool:
        """Called before each forward pass of training, while no optimizer has stepped."""
        self._looks += 1
        if self._looks > LOOKS:
            return False
        before = self._values
        first = (p.detach()[:1] if p.dim() else p.detach() for p in self._weights)
        self._values = torch.cat([values.reshape(-1)[:SAMPLE].float() for values in first])
        self._changes += before is not None and not torch.equal(before, self._values)
        return self._changes >= BY_HAND


def shards_states(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ranks update different parameters and then broadcast them: torch's ZeroRedundancyOptimizer."""
    return any(each.__name__ == "ZeroRedundancyOptimizer" for each in type(optimizer).__mro__)
