"""Runs reductions while the backward pass continues.

On Gloo, collectives must start in the same order on every rank and nothing may wait inside a
future's callback. So each stage of a reduction has its own thread and process group, and
buckets pass through the stages in the order in which DDP submits them: while one bucket is on
the wire, the next is being encoded. On CUDA the same steps are queued on side streams.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trimtab.collectives.reduction import MAX_STAGES
from trimtab.errors import TrimtabError
from trimtab.shutdown import close_at_exit

StageObserver = Callable[[tuple[int, int, Any, Any]], None]
"""Is called with the number of a bucket, its stage, and when this rank's own work in it began and ended: values of
`time.perf_counter`, or CUDA events."""


class Runner(Protocol):
    """Runs reductions in the order in which they are submitted."""

    observe: StageObserver | None
    """Set or cleared between steps."""

    def submit(self, steps: Iterator[dist.Work], result: torch.Tensor) -> Any:
        """A `torch.futures.Future` that holds `result` when `steps` have finished."""

    def close(self, timeout: float | None = None) -> None:
        """Stop; reductions already submitted are finished first, or given up after `timeout` seconds."""


class ThreadPipeline:
    """A FIFO thread for each stage, for CPU process groups."""

    def __init__(self) -> None:
        self.observe: StageObserver | None = None
        self._submitted = 0
        self._queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(MAX_STAGES + 1)]
        self._broken: Exception | None = None
        self._threads = [
            threading.Thread(target=self._serve, args=(stage,), name=f"trimtab-stage-{stage}", daemon=True)
            for stage in range(len(self._queues))
        ]
        for thread in self._threads:
            thread.start()
        close_at_exit(self)

    def submit(self, steps: Iterator[dist.Work], result: torch.Tensor) -> Any:
        future: Any = torch.futures.Future()
        self._submitted += 1
        self._queues[0].put((self._submitted, steps, None, result, future))
        # DDP treats whatever a future holds as a tensor, even an exception: only one raised in a callback
        # reaches it as an error.
        return future.then(torch.futures.Future.value)

    def close(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        for queue, thread in zip(self._queues, self._threads, strict=True):
            queue.put(None)
            thread.join(None if deadline is None else max(deadline - time.monotonic(), 0.0))

    def _serve(self, stage: int) -> None:
        queue = self._queues[stage]
        while (item := queue.get()) is not None:
            number, steps, work, result, future = item
            try:
                if self._broken is not None:
                    raise self._broken
                if work is not None:
                    work.wait()
                observe, start = self.observe, time.perf_counter()
                started = next(steps, None)
                if observe is not None:
                    observe((number, stage, start, time.perf_counter()))
            except Exception as error:
                # A failed collective leaves the group unusable: fail what follows instead of hanging.
                self._broken = self._broken or _failure(error)
                future.set_exception(self._broken)
                continue
            if started is None:
                future.set_result(result)
            else:
                self._queues[stage + 1].put((number, steps, started, result, future))


def _failure(error: Exception) -> Exception:
    """What DDP raises for `error`: the cause itself, unless a collective failed, whose cause lies on another rank."""
    if isinstance(error, TrimtabError):
        return error
    text = str(error)
    if isinstance(error, dist.DistError) or "gloo" in text or "NCCL" in text:
        return RuntimeError(
            f"reducing the gradients failed: has another rank ended? Its own output says why. ({text})"
        )
    failure = RuntimeError(f"reducing the gradients failed on this rank: {type(error).__name__}: {text}")
    failure.__cause__ = error
    return failure


class StreamRunner:
    """A CUDA side stream for each stage, fed by one thread: neither the device nor the host waits.

    Each stage has its own stream so that the next bucket is encoded while this one is on the
    wire, with high priority so that a short kernel of ours need not wait for a long one of the
    backward pass. The thread launches our kernels while autograd's thread launches its own.

    After a failure every later reduction fails with the same error: the ranks no longer start their
    collectives in one order, so that a new one would wait forever or mix up buckets.
    """

    def __init__(self, device: torch.device) -> None:
        if device.index is None:  # a future needs the index
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self.observe: StageObserver | None = None
        self._launched = 0
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(MAX_STAGES + 1)]
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="trimtab-launch", daemon=True)
        self._thread.start()
        close_at_exit(self)

    def submit(self, steps: Iterator[dist.Work], result: torch.Tensor) -> Any:
        future: Any = torch.futures.Future(devices=[self._device])
        filled = torch.cuda.Event()
        filled.record(torch.cuda.current_stream(self._device))
        self._queue.put((steps, filled, result, future))
        return future.then(
            torch.futures.Future.value
        )  # as in `ThreadPipeline.submit`: DDP would take the exception for a tensor

    def close(self, timeout: float | None = None) -> None:
        self._queue.put(None)
        self._thread.join(timeout)

    def _serve(self) -> None:
        torch.cuda.set_device(self._device)
        while (item := self._queue.get()) is not None:
            steps, filled, result, future = item
            try:
                if self._broken is not None:
                    raise self._broken
                self._launch(steps, filled, result, future)
            except Exception as error:
                # What was queued before may wait for a collective that never ends: fail what follows.
                self._broken = self._broken or _failure(error)
                future.set_exception(self._broken)

    def _launch(self, steps: Iterator[dist.Work], filled: Any, result: torch.Tensor, future: Any) -> None:
        self._streams[0].wait_event(filled)
        self._launched += 1
        work: dist.Work | None = None
        for stage, stream in enumerate(self._streams):
            with torch.cuda.stream(stream):
                if work is not None:
                    work.wait()
                observe = self.observe
                start = None if observe is None else _timed_event(stream)
                work = next(steps, None)
                if observe is not None:
                    observe((self._launched, stage, start, _timed_event(stream)))
                if work is None:
                    future.set_result(result)
                    return


def _timed_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def runner_for(device: torch.device) -> Runner:
    """The runner for tensors on a device."""
    return StreamRunner(device) if device.type == "cuda" else ThreadPipeline()
