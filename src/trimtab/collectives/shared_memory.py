"""Collectives between the ranks of one host, through shared memory.

The C++ library copies and adds CPU tensors; CUDA tensors go through the same memory, pinned
(`trimtab.collectives.cuda_staging`). Sums run in rank order, so that every rank computes the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
import torch.distributed as dist

from trimtab.codec import native
from trimtab.collectives.cuda_staging import Staged
from trimtab.collectives.shared_segment import share
from trimtab.errors import TrimtabError

TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SEGMENT_BYTES = 24 << 20
"""Default size of a segment of CPU tensors."""

CUDA_SEGMENT_BYTES = 64 << 20
"""Larger, because only long copies over PCIe are fast."""

MOST_ROOM = 3 << 20
"""Larger places leave the processor's cache; smaller ones make ranks that share a core wait more often."""

TIMEOUT_S = 1800.0
"""The same as torch's: a rank may write a checkpoint while the others wait. A dead rank is detected at once."""

_REDUCE_SCATTER, _ALL_GATHER = 1, 2
_BAD_CALL, _DEAD, _TIMEOUT, _MISMATCH = 1, 2, 3, 4


class Channel(ctypes.Structure):
    """`trimtab_channel` of csrc/shared_memory.h."""

    _fields_ = [
        ("base", ctypes.c_void_p), ("nbytes", ctypes.c_int64), ("fd", ctypes.c_int64), ("rank", ctypes.c_int64),
        ("world", ctypes.c_int64), ("room", ctypes.c_int64), ("timeout_ms", ctypes.c_int64),
        ("barriers", ctypes.c_int64), ("rounds", ctypes.c_int64), ("culprit", ctypes.c_int64),
    ]  # fmt: skip


class SharedMemory:
    """Collectives of the ranks that share a segment; each rank calls them from one thread, in the same order.

    Constructing one is collective over the whole `group`: every rank does it with the `members` (ranks of the
    group) of its own host. By default all ranks of the group are on this host.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        members: Sequence[int] | None = None,
        nbytes: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._members = sorted(members) if members is not None else list(range(dist.get_world_size(group)))
        self.rank, self.world = self._members.index(dist.get_rank(group)), len(self._members)
        cuda = device.type == "cuda"
        nbytes = nbytes or (CUDA_SEGMENT_BYTES if cuda else SEGMENT_BYTES)
        room = _room(self.world, nbytes, None if cuda else MOST_ROOM)
        total, failure = 0, ""
        try:
            self._library = _library()
            total = int(self._library.trimtab_shared_bytes(self.world, room))
        except TrimtabError as error:
            failure = str(error)  # passed on to the other ranks, which would otherwise wait for this one
        self._segment = share(total, self._members, group, device, failure=failure)
        # The tensor keeps the mapping alive for as long as anything uses it.
        self._bytes = torch.frombuffer(self._segment.memory, dtype=torch.uint8)
        self._channel = Channel(
            base=self._bytes.data_ptr(),
            nbytes=self._segment.nbytes,
            fd=self._segment.fd,
            rank=self.rank,
            world=self.world,
            room=room,
            timeout_ms=int(timeout_s * 1000),
        )
        self._broken = ""
        self._staged = Staged(self._bytes, self, device) if cuda else None

    @property
    def room(self) -> int:
        """Bytes of one place: the part of the segment for what one rank has for another."""
        return int(self._channel.room)

    def all_reduce(self, tensor: torch.Tensor, *, scale: float = 1.0) -> None:
        """Replace a contiguous tensor, in place, by the sum over ranks of `scale` × it."""
        if not tensor.is_contiguous():
            raise ValueError("shared memory reduces contiguous tensors in place; this one is not contiguous")
        flat = tensor.view(-1)
        cuts = [flat.numel() * rank // self.world for rank in range(self.world + 1)]
        self._exchange(_REDUCE_SCATTER | _ALL_GATHER, flat, cuts, scale)

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[int], *, scale: float = 1.0) -> None:
        """Leave rank r with the sum over ranks of `scale` × `flat` in elements cuts[r] to cuts[r + 1].

        The contents of the other elements are undefined afterwards.
        """
        self._exchange(_REDUCE_SCATTER, flat, cuts, scale)

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[int]) -> None:
        """Copy elements cuts[r] to cuts[r + 1] of rank r to every rank, for all r."""
        self._exchange(_ALL_GATHER, flat, cuts, 1.0)

    def barrier(self, tag: int = 0) -> None:
        """Return when every rank has called this, with the same tag."""
        self._check_usable()
        self._check(self._library.trimtab_shared_barrier(self._channel, tag))

    def next_turn(self) -> int:
        """Start a round: which half of the places it uses."""
        turn = int(self._channel.rounds) % 2
        self._channel.rounds += 1
        return turn

    def place(self, turn: int, source: int, target: int, nbytes: int) -> torch.Tensor:
        """The first `nbytes` of the place for what `source` has for `target`; they may reach into the next places."""
        assert nbytes <= self.room * (self.world - target)
        start = int(self._library.trimtab_shared_place(self._channel, turn, source, target))
        return self._bytes[start : start + nbytes]

    def close(self) -> None:
        """Release the segment; a rank that waits for this one gets an error."""
        if not self._broken:
            self._broken = "it is closed"
        if self._staged is not None:
            self._staged.close()
        self._segment.close()

    def _exchange(self, operation: int, flat: torch.Tensor, cuts: Sequence[int], scale: float) -> None:
        self._check_usable()
        if flat.dtype not in TYPES or flat.dim() != 1 or not flat.is_contiguous():
            raise ValueError(
                f"shared memory takes 1-D contiguous float tensors; got {flat.dtype}, {tuple(flat.shape)}"
            )
        if len(cuts) != self.world + 1 or cuts[0] < 0 or cuts[-1] > flat.numel() or not _ascending(cuts):
            raise ValueError(
                f"cuts must be {self.world + 1} ascending places in {flat.numel()} elements; got {cuts}"
            )
        if flat.device.type == "cuda":
            assert self._staged is not None, "constructed for the CPU, called with a CUDA tensor"
            if operation & _REDUCE_SCATTER:
                self._staged.reduce_scatter(flat, cuts, scale)
            if operation & _ALL_GATHER:
                self._staged.all_gather(flat, cuts)
            return
        places = (ctypes.c_int64 * len(cuts))(*cuts)
        self._check(
            self._library.trimtab_shared_exchange(
                self._channel, operation, TYPES.index(flat.dtype), flat.data_ptr(), places, scale
            )
        )

    def _check_usable(self) -> None:
        if self._broken:
            raise TrimtabError(f"shared memory: this segment cannot be used any more: {self._broken}")

    def _check(self, status: int) -> None:
        if not status:
            return
        assert status != _BAD_CALL, "_exchange has checked the sizes"
        who = f"rank {self._members[self._channel.culprit]} of the group"
        self._broken = {
            _DEAD: f"{who} has ended or closed it; its own output says why",
            _TIMEOUT: f"{who} is alive but did not take part within {self._channel.timeout_ms / 1000:g} s",
            _MISMATCH: f"{who} made a different call than rank {self._members[self.rank]}",
        }[status]
        raise TrimtabError(f"shared memory: {self._broken}")


def _room(world: int, nbytes: int, most: int | None) -> int:
    room = nbytes // (2 * world * world) // 64 * 64
    if room < 64:
        raise TrimtabError(f"a shared segment of {nbytes} bytes is too small for {world} ranks; request more")
    return room if most is None else min(room, most)


def _ascending(cuts: Sequence[int]) -> bool:
    return all(a <= b for a, b in pairwise(cuts))


@cache
def _library() -> ctypes.CDLL:
    library = native.load()
    pointer, integer = ctypes.POINTER(Channel), ctypes.c_int64
    native.declare(
        library,
        trimtab_shared_bytes=[integer, integer],
        trimtab_shared_place=[pointer, integer, integer, integer],
        trimtab_shared_barrier=[pointer, ctypes.c_uint64],
        trimtab_shared_exchange=[
            *(pointer, integer, integer, ctypes.c_void_p, ctypes.POINTER(integer), ctypes.c_double)
        ],
    )
    return library
