"""The timing helper: lockstep across ranks, the slowest rank's time, and fits."""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trimtab.measure.timing import lockstep_seconds, repeated_seconds, seconds_per_call

if TYPE_CHECKING:
    from tests.support.pool import Pool

CPU = torch.device("cpu")


def uneven_times() -> tuple[float, float]:
    """The second rank works ten times as long, and arrives late."""
    rank = dist.get_rank()
    time.sleep(0.05 * rank)

    def work() -> None:
        time.sleep(0.1 if rank == 1 else 0.01)

    return lockstep_seconds(work, CPU), repeated_seconds(work, CPU, repeats=2)


def test_ranks_start_together_and_the_slowest_counts(ranks: Pool) -> None:
    (fast, slowest), (slow, same) = ranks(2, uneven_times)
    assert 0.01 <= fast < 0.05, "arriving first is not counted"
    assert slow >= 0.1
    assert slowest == same >= 0.1


def test_calls_are_repeated_until_they_can_be_timed() -> None:
    calls = count()

    def work() -> None:
        next(calls)
        time.sleep(0.001)

    seconds = seconds_per_call(work, CPU, at_least_s=0.02, gpu_calls=1)
    assert next(calls) > 3
    assert 0.001 <= seconds < 0.02


def test_a_call_is_timed_even_when_there_is_no_time() -> None:
    calls: list[int] = []
    seconds = seconds_per_call(lambda: calls.append(1), CPU, at_least_s=0.0, gpu_calls=1)
    assert len(calls) == 2, "once to warm up"
    assert seconds > 0
