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
from trimtab.api.set_precision import set_precision
from trimtab.codec import Block
from trimtab.control.compression.ddp import compression_of
from trimtab.measure.timing import meet, synchronize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.bench.scenarios.predict.models import Task

Trainer = tuple[torch.nn.Module, DistributedDataParallel, torch.optim.Optimizer]


class Trainers:
    """Real training steps. Every rank calls the same methods in the same order."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self.device = task, device
        self._made: dict[int | None, Trainer] = {}
        self.held: dict[int | None, int] = {}
        """Bytes that each trainer holds between steps (CUDA)."""

    def make(self, way: int | None) -> bool:
        """Make the trainer of a way to communicate (bits, or None for fp32); False if there is one."""
        if way in self._made:
            return False
        module = copy.deepcopy(self._task.model)
        ddp = DistributedDataParallel(module)
        if way is not None:
            trimtab.compress(ddp, Block(bits=way))
        self._made[way] = module, ddp, torch.optim.AdamW(module.parameters(), lr=1e-4)
        return True

    def step(self, way: int | None, samples: int, precisions: Mapping[str, str]) -> float:
        """Seconds of one step, until the last rank has ended it."""
        module, ddp, optimiser = self._made[way]
        set_precision(module, precisions)
        batch = self._task.batch(samples)
        meet(self.device)
        start = time.perf_counter()
        with self._half():
            loss = ddp(*batch)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        synchronize(self.device)
        taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=self.device)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return float(taken)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def close(self) -> None:
        """Let go of the models; nothing trains after this."""
        for _, ddp, _ in self._made.values():
            compression = compression_of(ddp)
            if compression is not None:
                compression.close()
        self._made.clear()

    def _half(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
