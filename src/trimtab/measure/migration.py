"""What it costs to move work between tensor-parallel ranks here: measured once, when a job starts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trimtab.predict.migration import MigrationCost

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.sharding.group import TensorGroup

_SIZES = {"cpu": (64 << 10, 2 << 20), "cuda": (1 << 20, 32 << 20)}
"""Bytes of the two transfers."""

_REPEATS = 3
_PRODUCT = {"cpu": (64, 512), "cuda": (1024, 4096)}
"""Rows and width of the products that a transfer is hidden behind."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Seconds of one all-to-all in which one rank's slices go to the others: fixed + per_byte * bytes."""

    fixed: float
    per_byte: float
    exposed: float
    """The part of it that products running at the same time do not hide: 0 all of it is hidden, 1 nothing."""

    def own(self, work_bytes: float, copies: int, blocks: int) -> MigrationCost:
        """Of moving parameters and optimiser state for good: one all-to-all a block."""
        return MigrationCost(fixed=self.fixed * blocks, slope=self.per_byte * work_bytes * copies)

    def lease(self, work_bytes: float, blocks: int) -> MigrationCost:
        """Of weights out and gradients back, in every step."""
        return MigrationCost(
            fixed=self.exposed * self.fixed * 2 * blocks, slope=self.exposed * self.per_byte * work_bytes * 2
        )


def measure_transfer(group: TensorGroup, device: torch.device) -> Transfer:
    """Time transfers from rank 0 to all others, small, large, and beside products; every rank calls it."""
    small, large = _SIZES.get(device.type, _SIZES["cuda"])
    short = _timed(lambda: _send(group, device, small).wait(), group, device)
    long = _timed(lambda: _send(group, device, large).wait(), group, device)
    per_byte = max(0.0, long - short) / (large - small)
    rows, width = _PRODUCT.get(device.type, _PRODUCT["cuda"])
    x, weight = torch.ones(rows, width, device=device), torch.ones(width, width, device=device)
    once = _timed(lambda: _multiply(x, weight, 8), group, device) / 8
    products = max(1, round(long / once))
    alone = _timed(lambda: _multiply(x, weight, products), group, device)

    def both() -> None:
        work = _send(group, device, large)
        _multiply(x, weight, products)
        work.wait()

    exposed = min(1.0, max(0.0, (_timed(both, group, device) - alone) / max(long, 1e-9)))
    return Transfer(fixed=max(1e-6, short - per_byte * small), per_byte=per_byte, exposed=exposed)


def _send(group: TensorGroup, device: torch.device, size: int) -> dist.Work:
    each = size // max(1, group.size - 1)
    out = [0 if rank == 0 or group.rank != 0 else each for rank in range(group.size)]
    into = [each if rank == 0 and group.rank != 0 else 0 for rank in range(group.size)]
    sent = torch.zeros(sum(out), dtype=torch.uint8, device=device)
    received = torch.empty(sum(into), dtype=torch.uint8, device=device)
    work: dist.Work | None = dist.all_to_all_single(
        received, sent, into, out, group=group.process_group, async_op=True
    )
    assert work is not None
    return work


def _multiply(x: torch.Tensor, weight: torch.Tensor, times: int) -> None:
    for _ in range(times):
        x @ weight


def _timed(act: Callable[[], object], group: TensorGroup, device: torch.device) -> float:
    """The shortest of a few times, on the rank where it was longest: the same number on every rank."""
    taken = []
    for _ in range(_REPEATS + 1):  # the first opens connections
        dist.barrier(group.process_group)
        _finish(device)
        start = time.perf_counter()
        act()
        _finish(device)
        taken.append(time.perf_counter() - start)
    longest = torch.tensor(taken, dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group.process_group)
    return float(longest[1:].min())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
