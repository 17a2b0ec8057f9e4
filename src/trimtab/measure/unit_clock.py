"""Time a tensor-parallel rank's own work per step, without waiting for a GPU's newest work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trimtab.sharding.clock import Clock

_Step = tuple[Any, Any, Sequence[tuple[Any, Any]], Sequence[tuple[Any, Any]]]


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

    def samples(self) -> list[tuple[float, float]]:
        """For each step since the last call: seconds in units, and other seconds without waits.

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
            times.append((inside, max(0.0, self._seconds((start, end)) - inside - waited)))
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
