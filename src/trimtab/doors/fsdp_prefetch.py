"""FSDP2 on CPUs: gather a module's weights while the one before it computes.

On a GPU FSDP2's streams do that. On a CPU a gather would begin when its module is about to compute, and everybody would
wait for it. In backward FSDP2 prefetches by itself, and only has to be told not to wait; in forward this does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class ForwardPrefetch:
    """Learns the order of the modules in the first forward pass, and prefetches by it from the second one on.

    A module that a later pass leaves out was gathered for nothing: FSDP2 lets go of it when the backward pass ends.
    Without gradients nothing is prefetched, because nothing would let go of it. Where a module is used twice in a
    pass nothing is prefetched either: it would have two successors.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._order: list[Any] = []
        self._next: dict[int, Any] | None = None
        self._handles = [module.register_forward_pre_hook(self._before) for module in modules]

    def _before(self, module: Any, _arguments: Any) -> None:
        # Activations that are computed again in backward are no forward pass.
        again = torch._C._current_graph_task_id() != -1
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or again:
            return
        if self._next is None:
            self._learn(module)
        if self._next is not None and (follower := self._next.get(id(module))) is not None:
            follower.unshard(async_op=True)

    def _learn(self, module: Any) -> None:
        if not any(seen is module for seen in self._order):
            self._order.append(module)
        elif module is self._order[0]:
            pairs = zip(self._order, self._order[1:], strict=False)
            self._next = {id(before): after for before, after in pairs}
        else:
            for handle in self._handles:
                handle.remove()
