"""A rank's own time in a step, and the part of it that the optimizer takes."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from trimtab.measure.local_clock import LocalClock


def train(clock: LocalClock, steps: int, *, updates: bool) -> None:
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(steps):
        loss = (weight * 2).sum()
        clock.follow(loss)
        loss.backward()
        optimizer.step()
        if updates:
            clock.update_ends()
        clock.end_step()


def test_the_update_is_a_part_of_a_step_and_read_once() -> None:
    clock = LocalClock(torch.device("cpu"))
    train(clock, 6, updates=True)
    assert clock.read_update() > 0
    assert clock.read() > 0
    assert clock.read_update() == 0.0


def test_without_an_optimizer_that_is_seen_nothing_is_known() -> None:
    clock = LocalClock(torch.device("cpu"))
    train(clock, 4, updates=False)
    assert clock.read_update() == 0.0
    train(clock, 4, updates=True)
    clock.forget()
    assert clock.read_update() == 0.0


class Tick:
    """An event of a GPU that is always over; time passes when `now` is advanced."""

    now: ClassVar[int] = 0

    def __init__(self) -> None:
        self.time = Tick.now

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Tick) -> float:
        return 1e3 * (later.time - self.time)


class GpuClock(LocalClock):
    """Has a GPU's events, but none of its work."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._cuda = True

    def _now(self) -> Any:
        return Tick()


class Passes(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        Tick.now += 2
        return x.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        Tick.now += 5
        return gradient


@pytest.mark.parametrize("passes", [1, 2])
def test_forward_passes_are_timed_by_themselves_on_a_gpu(passes: int) -> None:
    clock, weight = GpuClock(), torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(4):
        for _ in range(passes):
            loss = Passes.apply(weight).sum()  # type: ignore[no-untyped-call]
            clock.follow(loss)
            loss.backward()
        optimizer.step()
        Tick.now += 3  # as the optimizer's kernels
        clock.update_ends()
        clock.end_step()
        with clock.waiting():
            Tick.now += 4
    assert (clock.read_update(), clock.read_forward(), clock.read()) == (
        3.0,
        2.0 * passes,
        3.0 + 7.0 * passes,
    )
    assert clock.read_forward() == 0.0, "read once"


def test_on_a_cpu_backward_passes_need_no_correction() -> None:
    clock = LocalClock(torch.device("cpu"))
    train(clock, 6, updates=True)
    assert clock.read_forward() == 0.0
