"""Launches of Triton kernels that cost the host less than Triton's own.

Triton looks at every argument and option of every launch to find the compiled kernel, and asks the driver about every
pointer. A small layer in 8 bits then takes the host longer than an H200. So everything that a step repeats (grid,
sizes, constants) is put together once in a `Launch`, and a launch passes addresses. Each allocation costs the host
about as much as a launch, so what kernels hand on to one another can share one: a `Room`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 16
"""Bytes: what Triton compiles for, if all addresses are multiples of it."""

_APART = 128
"""Parts of a room begin at multiples of this: the bytes that a processor reads at a time."""

_ZEROS = 1 << 18
"""Numbers that are set to zero at a time."""

_compiled: dict[tuple[Any, ...], Any] = {}
_pools = threading.local()


class Launch:
    """A kernel for tensors of the same types and sizes, with all else fixed.

    Args:
        numbers: the arguments after the tensors (and what varies) that are no constants, in the order of the
            kernel's signature.
        constants: those after them, in that order.
        options: of the compiler; always the same for the same constants.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        numbers: tuple[int, ...],
        constants: dict[str, int | bool],
        **options: Any,
    ) -> None:
        self._kernel, self._grid, self._options = kernel, grid, options
        self._numbers, self._constants = numbers, constants
        self._after = (*numbers, *constants.values())
        self._device = -1
        self._run: Any = None
        self._before: tuple[Any, ...] = ()

    def __call__(self, tensors: Sequence[Tensor] | Sequence[int], *varying: float) -> None:
        """Run on the current stream.

        Args:
            tensors: or their addresses, if the launch is one of those that `take` them.
            varying: arguments between the tensors and the fixed numbers, which the kernel is not specialized for.
        """
        device = self._device
        addresses: Sequence[int]
        if type(tensors[0]) is int:
            addresses = tensors  # type: ignore[assignment]
        else:
            addresses = [tensor.data_ptr() for tensor in tensors]  # type: ignore[union-attr]
            if not take((self,), addresses):
                self._slowly(tensors, varying)  # type: ignore[arg-type]
                return
        stream = torch._C._cuda_getCurrentRawStream(device)
        self._run(*self._grid, stream, *self._before, *addresses, *varying, *self._after)

    def _slowly(self, tensors: Sequence[Tensor], varying: tuple[float, ...]) -> None:
        """As Triton does it; what it compiles is kept, by which tensors are aligned."""
        first = tensors[0]
        if first.device.type != "cuda":  # interpreted
            self._kernel[self._grid](*tensors, *varying, *self._numbers, **self._constants, **self._options)
            return
        with torch.cuda.device(first.device):
            kinds = tuple(tensor.dtype for tensor in tensors)
            sizes = tuple((n % _ALIGNED == 0, n == 1, -(1 << 31) <= n < 1 << 31) for n in self._numbers)
            aligned = tuple(tensor.data_ptr() % _ALIGNED == 0 for tensor in tensors)
            key = (self._kernel, first.get_device(), kinds, aligned, sizes, *self._constants.values())
            compiled = _compiled.get(key)
            if compiled is None:
                compiled = self._kernel[self._grid](
                    *tensors, *varying, *self._numbers, **self._constants, **self._options
                )
            else:
                compiled[self._grid](*tensors, *varying, *self._after)
        _compiled[key] = compiled
        if all(aligned):
            # No metadata for and no hooks of Triton's own profiler.
            self._before = (compiled.function, compiled.packed_metadata, None, None, None)
            self._run, self._device = compiled.run, first.get_device()


def take(launches: Iterable[Launch], addresses: Iterable[int]) -> bool:
    """Whether these run with addresses alone: they are compiled for the current device, and addresses are aligned."""
    current = None
    for launch in launches:
        device = launch._device
        if device != current:
            if device < 0 or torch._C._cuda_getDevice() != device:
                return False
            current = device
    bits = 0
    for address in addresses:
        bits |= address
    return bits % _ALIGNED == 0


class Room:
    """Parts of one allocation, for what only the kernels read that run one after another.

    Args:
        parts: the dtype of each, and how many numbers it has.
    """

    def __init__(self, *parts: tuple[torch.dtype, int]) -> None:
        self.nbytes = 0
        self._parts: list[tuple[int, int, torch.dtype]] = []
        for dtype, numel in parts:
            end = self.nbytes + numel * dtype.itemsize
            self._parts.append((self.nbytes, end, dtype))
            self.nbytes = ceil_div(end, _APART) * _APART

    def tensors(self, memory: Tensor) -> list[Tensor]:
        """The parts of this memory."""
        return [memory[start:end].view(dtype) for start, end, dtype in self._parts]

    def addresses(self, memory: Tensor) -> list[int]:
        """Of the parts of this memory."""
        first = memory.data_ptr()
        return [first + start for start, _, _ in self._parts]


def zeros(n: int, device: torch.device) -> Tensor:
    """n zeros of int32, at least one, for one use: set to zero together with many others, in one launch."""
    room = max(4, -(-n // 4) * 4)  # 16 bytes, so that the next ones are aligned
    if device.type != "cuda" or room > _ZEROS or torch.cuda.is_current_stream_capturing():
        # A captured graph must set them to zero each time it is replayed.
        return torch.zeros(max(1, n), dtype=torch.int32, device=device)
    pools: dict[Any, tuple[Tensor, int]] = _pools.__dict__.setdefault("by_stream", {})
    where = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    pool, used = pools.get(where, (None, 0))
    if pool is None or used + room > _ZEROS:
        pool, used = torch.zeros(_ZEROS, dtype=torch.int32, device=device), 0
    pools[where] = pool, used + room
    return pool[used : used + n]


def ceil_div(n: int, by: int) -> int:
    """n / by, rounded up; triton.cdiv wraps every number that it is given."""
    return -(-n // by)


def power_of_2(n: int) -> int:
    """The smallest power of two that is not less than n."""
    return 1 << max(0, n - 1).bit_length()
