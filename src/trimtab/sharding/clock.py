"""What a rank's own work takes, apart from waiting for the others.

A step's wall time is the same on every rank, because the collectives make them wait for each
other. So a clock counts what lies between collectives: the blocks of units, whose time changes
with the assignment, and the waits; the rest of a step is its wall time less these two.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Seconds since the last reading."""

    blocks: float
    """In blocks of units, forward and backward."""

    meetings: float
    """In the collectives of the blocks, waits for slower ranks included."""


class Clock:
    """Counts for one rank; on a GPU by events on the current stream, read after the step."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._begun: Any = None
        self._blocks: list[tuple[Any, Any]] = []
        self._meetings: list[tuple[Any, Any]] = []

    def block_begins(self) -> None:
        self._begun = self._now()

    def block_ends(self) -> None:
        # Frozen inputs leave out a block's backward end or start: half a pair counts for nothing.
        if self._begun is not None:
            self._blocks.append((self._begun, self._now()))
            self._begun = None

    @contextmanager
    def meeting(self) -> Iterator[None]:
        start = self._now()
        yield
        self._meetings.append((start, self._now()))

    def read(self) -> Segments:
        """What was counted since the last reading; on a GPU it waits for the stream."""
        if self._cuda:
            torch.cuda.current_stream().synchronize()
        read = Segments(
            blocks=sum(map(self._seconds, self._blocks)), meetings=sum(map(self._seconds, self._meetings))
        )
        self._blocks, self._meetings = [], []
        return read

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, pair: tuple[Any, Any]) -> float:
        start, end = pair
        return float(start.elapsed_time(end)) / 1e3 if self._cuda else float(end - start)
