"""Real training steps of one rank, timed per operator, in lockstep with the job's other ranks.

Ranks that share a machine, a link or a power limit slow each other down. So all ranks of a job start every timed
step together, and its optimizer too, as they do in training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.measure.operators import StepClock, StepTimes, anchored, host_ahead, without_communication
from trimtab.measure.timing import meet
from trimtab.precision.half import DTYPES
from trimtab.precision.setting import set_operators
from trimtab.workload import Workload


class StepTrainer:
    """Trains a model with DDP without communication. Every rank calls the same methods in the same order."""

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        device: torch.device,
        *,
        batch_of: Callable[[int], tuple[Any, ...]],
        loss_of: Callable[[Any], torch.Tensor] = lambda output: output,
        autocast: str | None = None,
    ) -> None:
        """
        Args:
            model: is trained in place; `close` restores its precisions.
            batch_of: the model's arguments for a number of samples.
            loss_of: the scalar loss from the model's output.
        """
        self._ddp = DistributedDataParallel(model)
        without_communication(self._ddp)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        self._workload, self._device = workload, device
        self._batch_of, self._loss_of, self._autocast = batch_of, loss_of, autocast

    def timed(self, samples: int, precisions: Mapping[str, str]) -> StepTimes:
        """One step with this many samples, with some operators, by name, in lower precision."""
        step = self._step(samples, precisions, whole=False)
        if self._device.type == "cpu":
            return step  # reading a clock costs next to nothing
        return anchored(step, self._step(samples, precisions, whole=True))

    def close(self) -> None:
        """Restore the model's own precision."""
        set_operators(self._ddp, {})
        self._optimizer.zero_grad()

    def _step(self, samples: int, precisions: Mapping[str, str], *, whole: bool) -> StepTimes:
        set_operators(self._ddp, precisions)
        batch = self._batch_of(samples)

        def loss() -> torch.Tensor:
            kind = self._autocast
            with torch.autocast(self._device.type, DTYPES[kind]) if kind else nullcontext():
                return self._loss_of(self._ddp(*batch))

        def ready() -> None:
            # After the last average all ranks start their update together.
            meet(self._device)
            host_ahead(self._device)

        def update() -> None:
            self._optimizer.step()
            self._optimizer.zero_grad()

        clock = StepClock(self._ddp.module, self._workload, self._device)
        meet(self._device)
        return clock.step(loss, update, ready=ready, whole=whole)
