"""The `Reduction` protocol: a sequence of collectives with local work between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

STAGE_GROUPS = 2
"""Process groups that a reduction needs: one for each of its collectives, or stages."""

MAX_STAGES = STAGE_GROUPS + 2
"""The most stages of any reduction: a hierarchy has one inside each host before those, and one after."""


class Reduction(Protocol):
    """Reduces one bucket, in place, to the same bits on every rank.

    `steps` yields each collective it has started and continues only when that has finished, so the
    caller decides how to wait: at once (`finish`), in a pipeline of threads (Gloo), or on a CUDA
    stream (NCCL). The k-th collective runs on the k-th of the groups the reduction was given, so
    that reductions overlapping in a pipeline start their collectives in the same order everywhere.
    """

    def steps(self, flat: torch.Tensor, *, step: int, scale: float) -> Iterator[dist.Work]:
        """Replace `flat` by the sum over ranks of `scale` × `flat`; each rank may have its own `scale`."""


def finish(steps: Iterator[dist.Work]) -> None:
    """Run a reduction to its end, waiting for each collective."""
    for work in steps:
        work.wait()


class PlainReduction:
    """The backend's own all-reduce of a bucket, or of one span of it: for values that are not encoded."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], span: slice = slice(None)) -> None:
        self._group, self._span = groups[0], span

    def steps(self, flat: torch.Tensor, *, step: int, scale: float) -> Iterator[dist.Work]:
        """1. all-reduce of the scaled values."""
        part = flat[self._span]
        if scale != 1.0:
            part.mul_(scale)
        yield started(dist.all_reduce(part, group=self._group, async_op=True))


class Works(dist.Work):
    """Waits for several operations, or none, and on CUDA for everything queued so far.

    A collective's own handle orders one stream after another; this does so where no collective is started.
    """

    def __init__(self, device: torch.device, works: Sequence[dist.Work] = ()) -> None:
        super().__init__()
        self._works = works
        self._queued: Any = None
        if device.type == "cuda":
            self._queued = torch.cuda.Event()
            self._queued.record(torch.cuda.current_stream(device))

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        if self._queued is not None:
            self._queued.wait()
        return True


def carried(*tensors: torch.Tensor) -> None:
    """Call after a `yield` with the tensors made before it that are still to be used, or are the collective's own.

    On CUDA each stage has its own stream, and freed memory returns to the stream that allocated it: the next
    bucket's first stage could reuse it while this one's later stages still read it.
    """
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def started(work: dist.Work | None) -> dist.Work:
    """The handle of a collective that was called with `async_op=True`, without the None in its type."""
    assert work is not None, "async_op=True always returns a Work"
    return work
