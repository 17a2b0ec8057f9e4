"""CUDA tensors through shared host memory: for GPUs that cannot access each other's memory.

The segment is pinned, so that copies run asynchronously. While one round is read and added on the device, the
next is written to the other half of the segment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.collectives.shared_memory import SharedMemory


class Staged:
    """Reduce-scatter and all-gather by copies to and from the places of a segment.

    Works on tensors of any device; on the CPU there are no streams, and copies are done when they return.
    Rules that keep a round's data from being overwritten: before a rank reaches the barrier of a round it
    has finished writing that round and reading the one before; a round is written only after the barrier of
    the one before, when every rank has read what was in its places.
    """

    def __init__(self, memory: torch.Tensor, places: SharedMemory, device: torch.device) -> None:
        self._memory, self._places, self._device = memory, places, device
        self._read: Any = None
        self._copies: Any = None
        if device.type == "cuda":
            # High priority: copies to the host do not wait for kernels.
            self._copies = torch.cuda.Stream(device, priority=-1)
            _checked(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))

    def close(self) -> None:
        """Unpin the segment after the device has finished with it."""
        if self._copies is not None:
            torch.cuda.synchronize(self._device)
            _checked(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
            self._copies = None

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[int], scale: float) -> None:
        """As `SharedMemory.reduce_scatter`, with the same bits."""
        places, rank = self._places, self._places.rank
        if scale != 1.0:
            flat[cuts[0] : cuts[-1]].mul_(scale)
        most = places.room // flat.element_size()
        wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
        longest = min(most, cuts[rank + 1] - cuts[rank])
        arrived = torch.empty(longest, dtype=flat.dtype, device=flat.device)
        total = torch.empty(longest, dtype=wide, device=flat.device)

        def write(turn: int, done: int) -> None:
            for target in range(places.world):
                part = _part(flat, cuts, target, done, most)
                if target != rank and part.numel():
                    room = places.place(turn, rank, target, part.nbytes).view(flat.dtype)
                    room.copy_(part, non_blocking=True)

        def read(turn: int, done: int) -> None:
            own = _part(flat, cuts, rank, done, most)
            count = own.numel()
            for source in range(places.world if count else 0):
                values = own
                if source != rank:
                    values = arrived[:count]
                    values.copy_(
                        places.place(turn, source, rank, own.nbytes).view(flat.dtype), non_blocking=True
                    )
                if source == 0:
                    total[:count].copy_(values)
                else:
                    total[:count].add_(values)
            own.copy_(total[:count])

        self._rounds(flat, cuts, most, write, read)

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[int]) -> None:
        """As `SharedMemory.all_gather`; a rank writes its values into its whole row of places."""
        places, rank = self._places, self._places.rank
        most = places.world * places.room // flat.element_size()

        def write(turn: int, done: int) -> None:
            own = _part(flat, cuts, rank, done, most)
            if own.numel():
                places.place(turn, rank, 0, own.nbytes).view(flat.dtype).copy_(own, non_blocking=True)

        def read(turn: int, done: int) -> None:
            for source in range(places.world):
                part = _part(flat, cuts, source, done, most)
                if source != rank and part.numel():
                    room = places.place(turn, source, 0, part.nbytes).view(flat.dtype)
                    part.copy_(room, non_blocking=True)

        self._rounds(flat, cuts, most, write, read)

    def _rounds(
        self,
        flat: torch.Tensor,
        cuts: Sequence[int],
        most: int,
        write: Callable[[int, int], None],
        read: Callable[[int, int], None],
    ) -> None:
        """1. write the first round. Then, round by round:
        2. wait until it is written and the one before is read; barrier; write the next, and read this one.
        """
        longest = max(cuts[rank + 1] - cuts[rank] for rank in range(self._places.world))
        starts = list(range(0, longest, most))
        if not starts:
            return
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(flat.device))
        turn = self._places.next_turn()
        written = self._aside(write, turn, 0)
        for index, done in enumerate(starts):
            _wait(written)
            _wait(self._read)
            self._places.barrier(_tag(flat, cuts, done))
            this = turn
            if index + 1 < len(starts):
                turn = self._places.next_turn()
                written = self._aside(write, turn, starts[index + 1])
            read(this, done)
            self._read = _event(torch.cuda.current_stream(flat.device)) if self._copies is not None else None

    def _aside(self, write: Callable[[int, int], None], turn: int, done: int) -> Any:
        if self._copies is None:
            write(turn, done)
            return None
        with torch.cuda.stream(self._copies):
            write(turn, done)
            return _event(self._copies)


def _part(flat: torch.Tensor, cuts: Sequence[int], owner: int, done: int, most: int) -> torch.Tensor:
    start = min(cuts[owner] + done, cuts[owner + 1])
    return flat[start : min(start + most, cuts[owner + 1])]


def _tag(flat: torch.Tensor, cuts: Sequence[int], done: int) -> int:
    return hash((flat.element_size(), done, *cuts)) & (2**64 - 1)


def _event(stream: Any) -> Any:
    # Blocking: a host that spins would take a core from the other ranks.
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def _wait(event: Any) -> None:
    if event is not None:
        event.synchronize()


def _checked(status: Any) -> None:
    torch.cuda.check_error(int(status))
