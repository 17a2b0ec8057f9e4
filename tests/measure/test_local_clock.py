"""A rank's own time in a step, and the part of it that the optimizer takes."""

from __future__ import annotations

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
