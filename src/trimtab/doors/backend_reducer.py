"""Compressed all-reduces of flat buffers of any size and order, on one device of one group."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from trimtab.codec import Block
from trimtab.codec.packing import RAW
from trimtab.collectives import Hierarchy, Piece, Reduction, reduction_for, runner_for
from trimtab.collectives.groups import destroy_groups
from trimtab.doors.ddp import stage_groups

Key = tuple[tuple[tuple[int, bool], ...], torch.dtype]
"""Of each tensor its number of values and whether they are encoded; and their type."""

MOST_IDLE = 64
"""Reductions kept for reuse by buffers of the same sizes: more than a large model has buckets."""


def encoded_tensors(tensors: Sequence[torch.Tensor], min_numel: int) -> list[bool]:
    """Which tensors of a call are encoded: those of at least `min_numel` values, beside matrices no vectors.

    Vectors among matrices are biases and norms, as in DDP's filter. Vectors alone may be flat buffers of many
    parameters, such as DDP's buckets, in which nothing can be told apart.
    """
    axes = min(max((tensor.dim() for tensor in tensors), default=0), 2)
    return [tensor.dim() >= axes and tensor.numel() >= min_numel for tensor in tensors]


class Reducer:
    """Reduces buffers in order, several in flight at a time; every rank ends with the same bits."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        codec: Block,
        device: torch.device,
        *,
        min_numel: int,
        seed: int,
        hierarchy: Hierarchy | None = None,
    ) -> None:
        """With the `hierarchy` of ranks on one host, sums are exact, through shared memory."""
        self.groups = stage_groups(group, device)
        self.hierarchy = hierarchy
        self._codec, self._device, self._min_numel, self._seed = codec, device, min_numel, seed
        self._runner = runner_for(device)
        self._last: Any = None
        # Buffers of the same sizes may be in flight together, so each all-reduce takes a reduction, with its
        # payload buffers, out of this queue. The event is the one after which those buffers are free.
        self._idle: deque[tuple[Key, Reduction, Any]] = deque()

    def reduce(self, tensors: Sequence[torch.Tensor], step: int, scale: float) -> Reduced:
        """Start replacing the tensors by their sum over ranks of `scale` × them."""
        tensors = [tensor.detach() for tensor in tensors]
        self._last = self._runner.submit(self._steps(tensors, step, scale), tensors)  # type: ignore[arg-type]
        return Reduced(self._last)

    def wait(self) -> None:
        """For all that was started: buffers are reduced in order."""
        if self._last is not None:
            self._last.wait()

    def close(self, *, destroy: bool) -> None:
        """Finish what was started and stop the threads.

        `destroy` also destroys the groups of the stages; not needed with the default group: torch destroys them.
        """
        self._runner.close()
        if self.hierarchy is not None:
            self.hierarchy.close()
        if destroy:
            destroy_groups(self.groups)

    def _steps(self, tensors: list[torch.Tensor], step: int, scale: float) -> Iterator[dist.Work]:
        single = len(tensors) == 1
        flat = tensors[0].view(-1) if single else torch.cat([tensor.view(-1) for tensor in tensors])
        encoded = encoded_tensors(tensors, self._min_numel)
        key = tuple(zip((tensor.numel() for tensor in tensors), encoded, strict=True)), flat.dtype
        reduction = self._take(key)
        for work in reduction.steps(flat, step=step, scale=scale):
            self._in_use(flat)
            yield work
        self._in_use(flat)
        if not single:
            for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.view(-1).copy_(part)
                self._in_use(tensor)
        self._give_back(key, reduction)

    def _take(self, key: Key) -> Reduction:
        for _ in range(len(self._idle)):
            other, reduction, free = self._idle.popleft()
            if other == key:
                if free is not None:
                    torch.cuda.current_stream(self._device).wait_event(free)
                return reduction
            self._idle.append((other, reduction, free))
        return self._plan(*key)

    def _give_back(self, key: Key, reduction: Reduction) -> None:
        free = None
        if self._device.type == "cuda":
            free = torch.cuda.Event()
            free.record(torch.cuda.current_stream(self._device))
        self._idle.append((key, reduction, free))
        while len(self._idle) > MOST_IDLE:
            _, _, free = self._idle.popleft()
            if free is not None:
                free.synchronize()

    def _plan(self, sizes: tuple[tuple[int, bool], ...], dtype: torch.dtype) -> Reduction:
        pieces, offset = [], 0
        for index, (numel, encoded) in enumerate(sizes):
            bits = self._codec.bits if encoded else RAW
            piece = Piece(name=str(index), offset=offset, numel=numel, bits=bits, block=self._codec.block)
            pieces.append((piece, torch.Size((numel,))))
            offset += numel
        return reduction_for(
            pieces, dtype, self._device, self.groups, self._codec, seed=self._seed, hierarchy=self.hierarchy
        )

    def _in_use(self, tensor: torch.Tensor) -> None:
        """Keep the allocator from reusing the memory while this stage's stream may still access it."""
        if self._device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(self._device))


class Reduced(dist.Work):
    """The handle of a compressed all-reduce."""

    def __init__(self, future: Any) -> None:
        super().__init__()
        self._future = future

    @_disable_dynamo
    def wait(self, timeout: Any = None) -> bool:
        """Until the result is there (CPU), or until the current stream may use it (CUDA)."""
        self._future.wait()
        return True

    def synchronize(self) -> None:
        self._future.wait()

    def block_current_stream(self) -> None:
        self._future.wait()

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        if not self._future.done():
            return None
        try:
            self._future.value()
        except Exception as error:
            return error
        return None

    def get_future(self) -> Any:
        return self._future

    def result(self) -> list[torch.Tensor]:
        self._future.wait()
        values: list[torch.Tensor] = self._future.value()
        return values
