"""What kind of optimiser a job has: one that takes gradients as they come, or one that scales values by their size."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from trimtab.planning.compression.family import ADAMW, SGD

if TYPE_CHECKING:
    from collections.abc import Collection


class OptimiserWatch:
    """Sees which optimisers update some parameters, from their first steps; scripts need not name them."""

    def __init__(self, parameters: Collection[int]) -> None:
        """`parameters` are ids."""
        self._parameters = parameters
        self.kind: str | None = None
        """`SGD` or `ADAMW`; None until an optimiser has stepped. Of several, the one that asks for more counts."""
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def close(self) -> None:
        self._hook.remove()

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        if any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            self.kind = ADAMW if ADAMW in (self.kind, kind_of(optimizer)) else SGD


def kind_of(optimizer: Optimizer) -> str:
    """`SGD` for torch's own, with or without momentum; any other is taken to care for small values as Adam does."""
    return SGD if isinstance(optimizer, torch.optim.SGD) else ADAMW
