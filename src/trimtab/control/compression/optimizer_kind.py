"""Which kind of optimizer a job has: one that uses gradients directly, or one that scales each value by its size."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from trimtab.planning.compression.family import ADAMW, SGD


class OptimizerKind:
    """Detects the optimizers of some parameters when they first step; the script need not name them."""

    def __init__(self, parameters: Collection[int]) -> None:
        """`parameters` are their ids."""
        self._parameters = parameters
        self.kind: str | None = None
        """`SGD` or `ADAMW`; None until an optimizer has stepped. Of several kinds, the stricter one: `ADAMW`."""
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
    """`SGD` for torch's SGD, with or without momentum; any other is assumed to need small values, as Adam does."""
    return SGD if isinstance(optimizer, torch.optim.SGD) else ADAMW
