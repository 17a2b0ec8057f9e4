"""Running reductions beside the backward pass.

On Gloo, collectives must start in the same order on every rank and nothing may wait inside a
future's callback. So each stage of a reduction has a thread and a process group of its own, and
buckets pass through the stages in the order in which DDP hands them over: while one bucket is on
the wire, the next is being encoded. On CUDA the same steps are queued on a side stream.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trimtab.collectives.reduction import MAX_STAGES

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.distributed as dist


class Runner(Protocol):
    """Takes reductions in order, and promises their results."""

    def submit(self, steps: Iterator[dist.Work], result: torch.Tensor) -> Any:
        """A `torch.futures.Future` that holds `result` when `steps` have finished."""

    def close(self) -> None:
        """Stop; reductions already submitted are finished first."""


class ThreadPipeline:
    """A FIFO thread for each stage, for CPU process groups."""

    def __init__(self) -> None:
        self._queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(MAX_STAGES + 1)]
        self._broken: Exception | None = None
        self._threads = [
            threading.Thread(target=self._serve, args=(stage,), name=f"trimtab-stage-{stage}", daemon=True)
            for stage in range(len(self._queues))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, steps: Iterator[dist.Work], result: torch.Tensor) -> Any:
        future: Any = torch.futures.Future()
        self._queues[0].put((steps, None, result, future))
        return future

    def close(self) -> None:
        for queue, thread in zip(self._queues, self._threads, strict=True):
            queue.put(None)
            thread.join()

    def _serve(self, stage: int) -> None:
        queue = self._queues[stage]
        while (item := queue.get()) is not None:
            steps, work, result, future = item
            try:
                if self._broken is not None:
                    raise RuntimeError("an earlier reduction of this job failed") from self._broken
                if work is not None:
                    work.wait()
                started = next(steps, None)
            except Exception as error:
                # A failed collective leaves the group unusable: fail what follows instead of hanging.
                self._broken = self._broken or error
                future.set_exception(error)
                continue
            if started is None:
                future.set_result(result)
            else:
                self._queues[stage + 1].put((steps, started, result, future))


class StreamRunner:
    """A CUDA side stream: everything is queued at once, and nothing blocks the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, steps: Iterator[dist.Work], result: torch.Tensor) -> Any:
        future: Any = torch.futures.Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for work in steps:
                work.wait()
            future.set_result(result)
        return future

    def close(self) -> None:
        self._stream.synchronize()


def runner_for(device: torch.device) -> Runner:
    """The runner that suits a device."""
    return StreamRunner(device) if device.type == "cuda" else ThreadPipeline()
