"""Measure tensor-parallel ranks: speed and memory, what moving work between them costs, and each one's own work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trimtab.measure.timing import lockstep_seconds, repeated_seconds
from trimtab.predict.migration import Transfer
from trimtab.sharding.clock import Clock
from trimtab.sharding.group import TensorGroup

_SPEED_PRODUCT = {"cpu": (128, 1024), "cuda": (4096, 4096)}
"""Rows and width of the measured matrix product, enough to fill the device."""
_PRODUCTS = 4
_SAMPLES = 40
_WARMUP = 2
_MEMORY_FOR_UNITS = 0.5
"""Fraction of a device's free memory that units may take; activations and replicated parameters need the rest."""
_TRANSFERS = {"cpu": (64 << 10, 2 << 20), "cuda": (1 << 20, 32 << 20)}
"""Bytes of the two transfers."""
_REPEATS = 3
_OVERLAPPED = {"cpu": (64, 512), "cuda": (1024, 4096)}
"""Rows and width of the matrix products that overlap with a transfer."""

_Step = tuple[Any, Any, Sequence[tuple[Any, Any]], Sequence[tuple[Any, Any]]]
"""A step's start and end, and the intervals of its blocks and collectives."""


def measure_rank_speeds(
    group: TensorGroup, device: torch.device, dtype: torch.dtype
) -> tuple[list[float], list[float | None]]:
    """Matrix products per second and bytes of memory for units (None: no limit) of every rank. Collective."""
    rows, width = _SPEED_PRODUCT.get(device.type, _SPEED_PRODUCT["cuda"])
    x = torch.ones(rows, width, device=device, dtype=dtype)
    weight = torch.ones(width, width, device=device, dtype=dtype)

    def products() -> None:
        for _ in range(_PRODUCTS):
            x @ weight

    times = [lockstep_seconds(products, device, group.process_group) for _ in range(_WARMUP + _SAMPLES)]
    # The 20th percentile, over a second or two: a burst of other work must not count as slow hardware.
    typical = sorted(times[_WARMUP:])[_SAMPLES // 5]
    free = torch.cuda.mem_get_info(device)[0] * _MEMORY_FOR_UNITS if device.type == "cuda" else -1.0
    own = torch.tensor([1 / typical, free], dtype=torch.float64, device=device)
    by_rank = [torch.empty_like(own) for _ in range(group.size)]
    dist.all_gather(by_rank, own, group=group.process_group)
    return [float(speed) for speed, _ in by_rank], [None if m < 0 else float(m) for _, m in by_rank]


def measure_transfer(group: TensorGroup, device: torch.device) -> Transfer:
    """Time transfers from rank 0 to all others: small, large, and overlapped with matrix products. Collective."""
    small, large = _TRANSFERS.get(device.type, _TRANSFERS["cuda"])

    def typical(run: Callable[[], object]) -> float:
        return repeated_seconds(run, device, group.process_group, repeats=_REPEATS)

    short = typical(lambda: _send(group, device, small).wait())
    long = typical(lambda: _send(group, device, large).wait())
    per_byte = max(0.0, long - short) / (large - small)
    rows, width = _OVERLAPPED.get(device.type, _OVERLAPPED["cuda"])
    x, weight = torch.ones(rows, width, device=device), torch.ones(width, width, device=device)
    once = typical(lambda: _multiply(x, weight, 8)) / 8
    products = max(1, round(long / once))
    alone = typical(lambda: _multiply(x, weight, products))

    def both() -> None:
        work = _send(group, device, large)
        _multiply(x, weight, products)
        work.wait()

    exposed = min(1.0, max(0.0, (typical(both) - alone) / max(long, 1e-9)))
    return Transfer(fixed=max(1e-6, short - per_byte * small), per_byte=per_byte, exposed=exposed)


def _send(group: TensorGroup, device: torch.device, size: int) -> dist.Work:
    each = size // max(1, group.size - 1)
    out = [0 if rank == 0 or group.rank != 0 else each for rank in range(group.size)]
    into = [each if rank == 0 and group.rank != 0 else 0 for rank in range(group.size)]
    sent = torch.zeros(sum(out), dtype=torch.uint8, device=device)
    received = torch.empty(sum(into), dtype=torch.uint8, device=device)
    work: dist.Work | None = dist.all_to_all_single(
        received, sent, into, out, group=group.side, async_op=True
    )
    assert work is not None
    return work


def _multiply(x: torch.Tensor, weight: torch.Tensor, times: int) -> None:
    for _ in range(times):
        x @ weight


class UnitClock(Clock):
    """A `Clock` that knows where steps begin and end; CUDA events are reused."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._start: Any = None
        self._end: Any = None
        self._steps: list[_Step] = []
        self._free: list[Any] = []

    def begin(self) -> None:
        """A step begins here; times from before, outside a step, are dropped."""
        self._close()
        self._started, self._compute, self._collectives = None, [], []
        self._start = self._now()

    def end(self) -> None:
        """The step ends here, or at a later call: scripts may have several optimizers."""
        if self._start is not None:
            self._end = self._now()

    def forget(self) -> None:
        """Drop the steps so far."""
        self._start = self._end = None
        self._steps = []

    def samples(self) -> list[tuple[float, float, float]]:
        """For each step since the last call: seconds in units, other seconds without waits, and seconds in waits.

        On a GPU the last step may be left for the next call: waiting for it would leave the GPU without work.
        """
        self._close()
        steps, self._steps = self._steps, []
        if self._cuda and steps:
            if len(steps) > 1 and not steps[-1][1].query():
                self._steps = [steps.pop()]
            steps[-1][1].synchronize()
        times = []
        for start, end, blocks, meetings in steps:
            inside = sum(map(self._seconds, blocks))
            waited = sum(map(self._seconds, meetings))
            rest = max(0.0, self._seconds((start, end)) - inside - waited)
            times.append((inside, rest, waited))
            if self._cuda:
                self._free += [start, end, *(event for pair in (*blocks, *meetings) for event in pair)]
        return times

    def _close(self) -> None:
        if self._start is not None and self._end is not None:
            self._steps.append((self._start, self._end, self._compute, self._collectives))
        self._start = self._end = None

    def _now(self) -> Any:
        if not self._cuda or not self._free:
            return super()._now()
        event = self._free.pop()
        event.record()
        return event
