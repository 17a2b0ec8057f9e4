"""Time a tensor-parallel rank spends on its own work, apart from waiting for other ranks.

A step takes the same wall time on every rank, because its collectives make the ranks wait for each other. So a clock
times what lies between collectives: the units' computation, which depends on how many units the rank has, and the
collectives themselves, waits included. The rest of a step is its wall time minus these two.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class LocalTimes:
    """Seconds since the last reading."""

    compute: float
    """In the computation of units, forward and backward."""

    collectives: float
    """In the collectives around it, waits for slower ranks included."""


class Clock:
    """Times one rank. On a GPU it records events on the current stream and reads them after the step."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._started: Any = None
        self._compute: list[tuple[Any, Any]] = []
        self._collectives: list[tuple[Any, Any]] = []

    def compute_starts(self) -> None:
        self._started = self._now()

    def compute_ends(self) -> None:
        # With frozen inputs autograd skips one end of a block's backward pass: an unpaired mark is dropped.
        if self._started is not None:
            self._compute.append((self._started, self._now()))
            self._started = None

    @contextmanager
    def collective(self) -> Iterator[None]:
        start = self._now()
        yield
        self._collectives.append((start, self._now()))

    def read(self) -> LocalTimes:
        """The times since the last reading; on a GPU this waits for the current stream."""
        if self._cuda:
            torch.cuda.current_stream().synchronize()
        times = LocalTimes(
            compute=sum(map(self._seconds, self._compute)),
            collectives=sum(map(self._seconds, self._collectives)),
        )
        self._compute, self._collectives = [], []
        return times

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, pair: tuple[Any, Any]) -> float:
        start, end = pair
        return float(start.elapsed_time(end)) / 1e3 if self._cuda else float(end - start)
