"""A rank's own time, step by step: waits left out, nothing counted outside a step."""

from __future__ import annotations

from typing import Any

import torch

from trimtab.measure.tensor_ranks import UnitClock


class Counting(UnitClock):
    """Each look at the time is one second after the last."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._seconds_so_far = 0.0

    def _now(self) -> Any:
        self._seconds_so_far += 1
        return self._seconds_so_far


def work(clock: UnitClock) -> None:
    clock.compute_starts()
    clock.compute_ends()
    with clock.collective():
        pass


def test_blocks_waits_and_the_rest_add_up_to_the_step() -> None:
    clock = Counting()
    clock.begin()
    work(clock)
    work(clock)
    clock.end()
    # Looks at 1 (begin), 2-5 and 6-9 (two blocks and their meetings), 10 (end): nine seconds, two and two in pairs.
    assert clock.samples() == [(2.0, 5.0, 2.0)]
    assert clock.samples() == []


def test_what_lies_between_steps_does_not_count() -> None:
    clock = Counting()
    for _ in range(2):
        clock.begin()
        work(clock)
        clock.end()
        first_end = clock._end
        clock.end()  # a second optimiser
        assert clock._end > first_end
    assert clock.samples() == [(1.0, 4.0, 1.0)] * 2
    clock.begin()
    clock.forget()
    clock.end()
    assert clock.samples() == []
