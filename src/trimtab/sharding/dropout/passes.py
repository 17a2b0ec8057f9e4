"""Number the training passes of what draws random numbers, also where activation checkpointing recomputes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.errors import TrimtabError


@dataclass(eq=False)
class Passes:
    """The passes of one module. A recomputed pass has the number of the pass that it recomputes.

    The passes since the last backward pass are recomputed last first, as autograd goes back. Two backward passes of
    which each recomputes some of them could be in any order, so that is an error.
    """

    count: int = 0
    _new: int = 0
    """Passes since the last recomputed one."""
    _task: int = -1
    """The backward pass that recomputed last."""
    _again: int = 0
    """Passes that it has recomputed."""

    def next(self, name: str) -> int:
        """Number of the pass that begins, in the module of that name."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            if self._task != -1:
                self._task, self._new = -1, 0
            self._new += 1
            self.count += 1
            return self.count
        if task != self._task:
            if self._task != -1 and self._again < self._new:
                self._refuse(name)
            self._task, self._again = task, 0
        self._again += 1
        if self._new <= 1:  # there is only one, however often it is recomputed
            return self.count
        if self._again > self._new:
            self._refuse(name)
        return self.count - self._again + 1

    def _refuse(self, name: str) -> None:
        raise TrimtabError(
            f"tensor_parallel: {name} drew dropout in {self._new} forward passes before their backward passes, and "
            "activation checkpointing recomputes them in an unknown order; call backward after each forward pass, "
            "or leave out dropout or activation checkpointing there"
        )
