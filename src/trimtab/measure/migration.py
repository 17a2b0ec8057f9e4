"""Measure what moving work between tensor-parallel ranks costs, once, when a job starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trimtab.measure.timing import repeated_seconds
from trimtab.predict.migration import MigrationCost
from trimtab.sharding.group import TensorGroup

_SIZES = {"cpu": (64 << 10, 2 << 20), "cuda": (1 << 20, 32 << 20)}
"""Bytes of the two transfers."""

_REPEATS = 3
_PRODUCT = {"cpu": (64, 512), "cuda": (1024, 4096)}
"""Rows and width of the matrix products that overlap with a transfer."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Seconds of one all-to-all in which one rank's slices go to the others: fixed + per_byte * bytes."""

    fixed: float
    per_byte: float
    exposed: float
    """The fraction of it that concurrent matrix products do not hide: 0 if all is hidden, 1 if nothing is."""

    def own(self, work_bytes: float, copies: int, blocks: int) -> MigrationCost:
        """The cost of moving parameters and optimizer state permanently: one all-to-all per block."""
        return MigrationCost(fixed=self.fixed * blocks, slope=self.per_byte * work_bytes * copies)

    def lease(self, work_bytes: float, blocks: int) -> MigrationCost:
        """The cost of sending weights out and gradients back in every step."""
        return MigrationCost(
            fixed=self.exposed * self.fixed * 2 * blocks, slope=self.exposed * self.per_byte * work_bytes * 2
        )


def measure_transfer(group: TensorGroup, device: torch.device) -> Transfer:
    """Time transfers from rank 0 to all others: small, large, and overlapped with matrix products. Collective."""
    small, large = _SIZES.get(device.type, _SIZES["cuda"])

    def fastest(run: Callable[[], object]) -> float:
        return repeated_seconds(run, device, group.process_group, repeats=_REPEATS, statistic=min)

    short = fastest(lambda: _send(group, device, small).wait())
    long = fastest(lambda: _send(group, device, large).wait())
    per_byte = max(0.0, long - short) / (large - small)
    rows, width = _PRODUCT.get(device.type, _PRODUCT["cuda"])
    x, weight = torch.ones(rows, width, device=device), torch.ones(width, width, device=device)
    once = fastest(lambda: _multiply(x, weight, 8)) / 8
    products = max(1, round(long / once))
    alone = fastest(lambda: _multiply(x, weight, products))

    def both() -> None:
        work = _send(group, device, large)
        _multiply(x, weight, products)
        work.wait()

    exposed = min(1.0, max(0.0, (fastest(both) - alone) / max(long, 1e-9)))
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
