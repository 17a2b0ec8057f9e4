"""One rank's share of the job that `trimtab bench predict` predicts: its model, once for each way to communicate."""

from __future__ import annotations

import copy
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.codec import Block
from trimtab.runtime.compress import compression_of
from trimtab.runtime.probe_steps import StepClock, StepTimes, anchored, host_ahead, without_communication
from trimtab.runtime.set_precision import set_precision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.bench.predict_models import Task
    from trimtab.workload import Workload

PROBE = "probe"
"""In the place of bits: DDP that hands its buckets back and sends nothing."""

Trainer = tuple[torch.nn.Module, DistributedDataParallel, torch.optim.Optimizer]


class Trainers:
    """Real training steps. Every rank calls the same methods in the same order."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self.device = task, device
        self._made: dict[Any, Trainer] = {}
        self.held: dict[Any, int] = {}
        """Bytes that each trainer holds between steps (CUDA)."""

    def make(self, way: int | str | None) -> bool:
        """Make the trainer of a way to communicate (bits, None for fp32, or `PROBE`); False if there is one."""
        if way in self._made:
            return False
        module = copy.deepcopy(self._task.model)
        ddp = DistributedDataParallel(module)
        if way == PROBE:
            without_communication(ddp)
        elif isinstance(way, int):
            trimtab.compress(ddp, Block(bits=way))
        self._made[way] = module, ddp, torch.optim.AdamW(module.parameters(), lr=1e-4)
        return True

    def step(self, way: int | str | None, samples: int, precisions: Mapping[str, str]) -> float:
        """Seconds of one step, until the last rank has ended it."""
        module, ddp, optimiser = self._made[way]
        set_precision(module, precisions)
        batch = self._task.batch(samples)
        self.together()
        start = time.perf_counter()
        with self._half():
            loss = ddp(*batch)
        loss.backward()
        _update(optimiser)
        self._finish()
        taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=self.device)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return float(taken)

    def timed(self, workload: Workload, samples: int, precisions: Mapping[str, str]) -> StepTimes:
        """One step without communication, operator by operator."""
        step = self._clocked(workload, samples, precisions, whole=False)
        if self.device.type == "cpu":
            return step  # reading a clock costs nothing beside an operator
        return anchored(step, self._clocked(workload, samples, precisions, whole=True))

    def _clocked(
        self, workload: Workload, samples: int, precisions: Mapping[str, str], *, whole: bool
    ) -> StepTimes:
        module, ddp, optimiser = self._made[PROBE]
        set_precision(module, precisions)
        batch = self._task.batch(samples)
        clock = StepClock(module, workload, self.device)

        def loss() -> torch.Tensor:
            with self._half():
                found: torch.Tensor = ddp(*batch)
                return found

        def ready() -> None:
            # After the last average all ranks have it, and all begin to update.
            self.together()
            host_ahead(self.device)

        self.together()
        return clock.step(loss, lambda: _update(optimiser), ready=ready, whole=whole)

    def together(self) -> None:
        """Until every rank is here, with nothing left to do."""
        self._finish()
        dist.barrier()
        self._finish()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def close(self) -> None:
        """Let go of the models; nothing trains after this."""
        for _, ddp, _ in self._made.values():
            compression = compression_of(ddp)
            if compression is not None:
                compression.close()
        self._made.clear()

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _half(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()


def _update(optimiser: torch.optim.Optimizer) -> None:
    optimiser.step()
    optimiser.zero_grad()
