"""Time a rank's own work in a data-parallel step, without waiting for other ranks.

The wall time of a step is the same on every rank, because averaging the gradients makes them wait for
each other; CPU time reflects neither a quota nor a GPU. So two timestamps are taken in every backward pass:
when this rank has computed its last gradient, before DDP waits for the averages, and when that wait is
over. From the second of one pass to the first of the next, the rank does its own work: optimizer,
data, forward, backward.

Both timestamps are taken in callbacks of the autograd engine, which runs them in the order in which they were
queued, after the last gradient. The first is queued when the pass begins, before DDP queues its own; the
second is queued by the first, after DDP's. On a GPU they are events on the stream, which the host does not
wait for.

On a GPU collectives compute, too: those that wait for a slower rank occupy multiprocessors, so that the backward pass
of a fast rank takes as long as that of the slow one. The forward pass is timed by itself, as it meets none of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from trimtab.model_state import JobHook


class LocalClock:
    """Measures a rank's own time per step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._since: Any = None
        """Start of the current interval of own work; None while waiting, and before the first average."""
        self._paused = False
        self._worked: list[tuple[Any, Any]] = []
        """The intervals of own work in the current step."""
        self._steps: list[list[tuple[Any, Any]]] = []
        self._update: tuple[Any, Any] | None = None
        self._updates: list[tuple[Any, Any]] = []
        self._begin: Any = None
        """Start of the current interval of a forward pass."""
        self._forward: list[tuple[Any, Any]] = []
        """Those of the current step: from the end of the optimizer's step, or of a backward pass, to the next one."""
        self._forwards: list[list[tuple[Any, Any]]] = []
        self._in_backward = False

    def follow(self, loss: torch.Tensor) -> None:
        """Take the two timestamps in the backward pass of this loss."""
        if loss.requires_grad:
            loss.register_hook(self._backward_begins)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Do not count what happens inside: a collective, or something else that is not part of a step."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def pause(self) -> None:
        """From here on the rank waits for others."""
        if self._since is not None:
            now = self._now()
            self._worked.append((self._since, now))
            self._since, self._paused = None, True
            self._end_forward(now)

    def resume(self) -> None:
        """From here on the rank works on its own again."""
        if self._paused:
            self._since, self._paused = self._now(), False
            self._begin = None if self._in_backward else self._since

    def update_ends(self) -> None:
        """The optimizer has used the averages: what it took does not depend on the rank's samples."""
        if self._since is not None:
            self._update = self._since, self._now()
            self._begin = self._update[1]

    def end_step(self, *, keep: bool = True) -> None:
        """Count the work up to the last backward pass as one step; what follows belongs to the next."""
        if keep and self._worked:
            self._steps.append(self._worked)
            self._forwards.append(self._forward)
            if self._update is not None:
                self._updates.append(self._update)
        self._worked, self._update, self._forward = [], None, []

    def forget(self) -> None:
        """Drop the steps counted so far."""
        self._steps, self._updates, self._forwards = [], [], []

    def read_update(self) -> float:
        """Median seconds from the averages to the end of the optimizer's step, since the last reading; 0 if unknown."""
        updates, self._updates = self._updates, []
        if self._cuda:
            updates = [update for update in updates if update[1].query()]
        return median(self._seconds([update]) for update in updates) if updates else 0.0

    def read_forward(self) -> float:
        """Median seconds of the forward passes of a step since the last reading; 0 on a CPU, where nothing slows down
        backward passes alone, and if unknown."""
        forwards, self._forwards = self._forwards, []
        known = [own for own in forwards if self._cuda and own and own[-1][1].query()]
        return median(map(self._seconds, known)) if known else 0.0

    def read(self) -> float:
        """Median seconds of the steps since the last reading; NaN if there are none."""
        steps, self._steps = self._steps, []
        if self._cuda:
            # Only finished steps: waiting for the newest one would leave the GPU without work.
            while len(steps) > 1 and not steps[-1][-1][1].query():
                self._steps.insert(0, steps.pop())
            if steps:
                steps[-1][-1][1].synchronize()
        return median(map(self._seconds, steps)) if steps else float("nan")

    def _backward_begins(self, _gradient: torch.Tensor) -> None:
        self._end_forward(self._now())
        self._in_backward = True
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._last_gradient)

    def _last_gradient(self) -> None:
        self.pause()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._averages_are_there)

    def _averages_are_there(self) -> None:
        # Also the first time, when nothing was paused: the clock starts with a whole step.
        self._since, self._paused = self._now(), False
        self._begin, self._in_backward = self._since, False

    def _end_forward(self, now: Any) -> None:
        if self._begin is not None:
            self._forward.append((self._begin, now))
            self._begin = None

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, intervals: list[tuple[Any, Any]]) -> float:
        if self._cuda:
            return sum(float(start.elapsed_time(end)) for start, end in intervals) / 1e3
        return sum(float(end - start) for start, end in intervals)


def leave_out(module: torch.nn.Module, clock: Callable[[], LocalClock | None]) -> None:
    """Do not time a module that waits for other ranks, nor the backward pass of its last operation."""

    def pause(*_: Any) -> None:
        if (running := clock()) is not None:
            running.pause()

    def resume(*_: Any) -> None:
        if (running := clock()) is not None:
            running.resume()

    def forward_ends(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        resume()
        # Hooks of the operation, not of the module, which would forbid an in-place ReLU after it.
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            output.grad_fn.register_prehook(pause)
            output.grad_fn.register_hook(resume)

    module.register_forward_pre_hook(JobHook(pause))
    module.register_forward_hook(JobHook(forward_ends))
