"""The timing helper: lockstep across ranks, the slowest rank's time, and fits."""

from __future__ import annotations

import time
from itertools import count
from statistics import median
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from trimtab.measure.timing import (
    StepTimes,
    Timed,
    anchored,
    lockstep_seconds,
    never_falling,
    repeated_seconds,
    seconds_per_call,
)

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


def test_an_anchored_step_is_as_long_as_the_whole_one() -> None:
    step = StepTimes(forward=(1.0, 3.0), backward=(2.0, 6.0), optimizer=5.0)
    whole = StepTimes(forward=(1.0, 1.0), backward=(3.0, 3.0), optimizer=4.0)
    found = anchored(step, whole)
    assert found.forward == pytest.approx((0.5, 1.5))
    assert found.backward == pytest.approx((1.5, 4.5))
    assert found.optimizer == 4.0
    assert found.total == pytest.approx(whole.total)


def timed(samples: int, *passes: float, low: str = "") -> Timed:
    precisions = {"up": low} if low else {}
    return samples, precisions, [StepTimes((s / 4, s / 4), (s / 4, s / 4), 1.0) for s in passes]


def test_more_samples_never_take_less() -> None:
    # On the way up nothing changes; 4 and 6 samples are in the wrong order, as is bf16 throughout.
    given = [
        timed(6, 3.0),
        timed(2, 2.0, 9.0, 2.0),
        timed(4, 5.0),
        timed(2, 4.0, low="bf16"),
        timed(6, 2.0, low="bf16"),
    ]
    found = never_falling(given)
    assert [one[:2] for one in found] == [one[:2] for one in given]
    assert [median(step.passes for step in steps) for _, _, steps in found] == pytest.approx([4, 2, 4, 3, 3])
    assert found[1] == given[1]
    assert {step.optimizer for _, _, steps in found for step in steps} == {1.0}
    pooled = never_falling([timed(2, 3.0), timed(4, 5.0), timed(6, 1.0)])
    assert [steps[0].passes for _, _, steps in pooled] == pytest.approx([3, 3, 3])
