"""Times of operations on a GPU, for the figures that the tests record; nothing is asserted about them."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_AHEAD = 400_000


def milliseconds(operations: Mapping[str, Callable[[], object]], repeats: int = 15) -> dict[str, float]:
    """The median of each operation on the current stream, in interleaved rounds."""
    taken: dict[str, list[float]] = {name: [] for name in operations}
    for round_number in range(repeats + 3):
        for name, operation in operations.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_AHEAD)  # the host runs ahead, so that no launch is timed
            start.record()
            operation()
            end.record()
            end.synchronize()
            if round_number >= 3:
                taken[name].append(start.elapsed_time(end))
    return {name: round(statistics.median(times), 5) for name, times in taken.items()}


def over_copy(operations: Mapping[str, Callable[[], object]], repeats: int = 15) -> dict[str, float]:
    """The time of each operation over that of the one named "copy", whose milliseconds are given too."""
    median = milliseconds(operations, repeats)
    copy = median.pop("copy")
    return {"copy_ms": copy} | {name: round(time / copy, 4) for name, time in median.items()}
