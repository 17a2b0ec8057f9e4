"""Measuring compressed buckets as a job runs them: encoded, sent and decoded, one behind the other.

Encoding, transfers and decoding of different buckets should overlap. How well they do depends on the device: a
GPU with few hardware queues runs them in turn. Collective: every rank calls these at the same point.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trimtab.codec import Block
from trimtab.collectives import Piece, reduction_for, runner_for
from trimtab.integrations.ddp import stage_groups
from trimtab.predict.job import bits_of

if TYPE_CHECKING:
    from trimtab.collectives import Reduction
    from trimtab.workload import Workload

BLOCK = 1024


class ReductionProbe:
    """The buckets of a workload at a number of bits, with nothing to compute beside them."""

    def __init__(self, workload: Workload, bits: int, device: torch.device) -> None:
        self._device = device
        group = dist.group.WORLD
        assert group is not None
        groups = stage_groups(group, device)
        self._runner = runner_for(device)
        self._taken: list[float] = []
        tensors = {p.name: p.tensor for p in workload.parameters}
        chosen = bits_of(workload, bits)
        self._row: list[tuple[Reduction, torch.Tensor]] = []
        for bucket in workload.buckets:
            pieces, offset = [], 0
            for name in bucket.parameters:
                numel = tensors[name].numel
                piece = Piece(name=name, offset=offset, numel=numel, bits=chosen[name], block=BLOCK)
                pieces.append((piece, torch.Size(tensors[name].shape)))
                offset += numel
            reduction = reduction_for(pieces, torch.float32, device, groups, Block(bits=bits), seed=0)
            self._row.append((reduction, torch.zeros(offset, device=device)))
        self._run()

    def round(self) -> None:
        """Time all buckets once, until the slowest rank has finished."""
        self._taken.append(self._run())

    @property
    def seconds(self) -> float:
        """Of all buckets: the median of the rounds."""
        return median(self._taken)

    def close(self) -> None:
        self._runner.close()
        self._row.clear()

    def _run(self) -> float:
        self._finish()
        dist.barrier()
        self._finish()
        start = time.perf_counter()
        futures: list[Any] = [
            self._runner.submit(reduction.steps(flat, step=0, scale=1.0), flat)
            for reduction, flat in self._row
        ]
        for future in futures:
            future.wait()
        self._finish()
        taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=self._device)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return float(taken)

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
