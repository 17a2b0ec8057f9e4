"""Reductions of block-quantized buckets: scatter-reduce-allgather, and all-gather.

Both leave every rank with the same bits, because everyone, the owner of a value included,
keeps what was *decoded* from the bytes that traveled, and sums run in rank order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.codec.packing import RAW, Packing
from trimtab.collectives.reduction import carried, started
from trimtab.random_bits import OWN, REDUCED, stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trimtab.codec.error_feedback import ErrorFeedback
    from trimtab.codec.kernels import Kernels
    from trimtab.collectives.layout import Layout


class BlockReduction:
    """What the reductions of a bucket share: its layout, the groups, and how values are encoded."""

    def __init__(
        self,
        layout: Layout,
        groups: Sequence[dist.ProcessGroup],
        kernels: Kernels,
        *,
        seed: int,
        stochastic: bool,
        device: torch.device,
        memory: ErrorFeedback | None = None,
    ) -> None:
        self._layout, self._groups, self._device = layout, groups, device
        self._kernels, self._seed, self._stochastic, self._memory = kernels, seed, stochastic, memory
        self._rank, self._world = dist.get_rank(groups[0]), dist.get_world_size(groups[0])
        self._allocate()

    def _allocate(self) -> None:
        """Make the buffers of payloads that every step uses again."""
        raise NotImplementedError

    def _bytes(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def _encode_sum(
        self,
        flat: torch.Tensor,
        payloads: Sequence[torch.Tensor],
        packing: Packing,
        out: torch.Tensor,
        *,
        stream: int,
        scale: float,
        meant: torch.Tensor | None,
    ) -> None:
        """Add `payloads` to `scale` × `flat`, encode the sums, and leave them decoded in `flat`.

        With `meant`, where error feedback needs it, the sums themselves are kept there.
        """
        kernels, stochastic = self._kernels, self._stochastic
        if meant is None:
            kernels.reduce_encode(
                flat, payloads, packing, out, stream=stream, scale=scale, stochastic=stochastic
            )
            return
        assert scale == 1.0, "what is owed was added to values that were scaled before"
        for payload in payloads:
            kernels.decode(payload, packing, flat, add=True)
        for segment in packing.segments:
            part = slice(segment.offset, segment.offset + segment.numel)
            meant[part] = flat[part]
        kernels.encode(flat, packing, out, stream=stream, stochastic=stochastic)
        kernels.decode(out, packing, flat)


class ScatterReduceAllGather(BlockReduction):
    """Each rank owns a chunk: it receives everyone's, adds them up, and sends the sum to all.

    Every value is quantized exactly twice. Payload sent per rank: twice (W - 1) / W of the bucket's.
    """

    def _allocate(self) -> None:
        chunks, rank = self._layout.chunks, self._rank
        assert self._world == len(chunks)
        self._mine = chunks[rank]
        others = [segment for r, chunk in enumerate(chunks) if r != rank for segment in chunk.segments]
        self._others = Packing(segments=tuple(others), dtype=self._layout.dtype)
        self._send_sizes = [0 if r == rank else chunk.nbytes for r, chunk in enumerate(chunks)]
        self._receive_sizes = [0 if r == rank else self._mine.nbytes for r in range(self._world)]
        row = max(chunk.nbytes for chunk in chunks)
        self._sent, self._received = self._bytes(self._others.nbytes), self._bytes(sum(self._receive_sizes))
        self._sums, self._gathered = self._bytes(row), self._bytes(self._world * row)

    def steps(self, flat: torch.Tensor, *, step: int, scale: float) -> Iterator[dist.Work]:
        """1. encode every chunk but mine; all-to-all the codes to their owners.
        2. add what arrived to my own exact values, encode the sums, keep their decoded form; all-gather.
        3. decode the other owners' sums.
        """
        kernels, stochastic = self._kernels, self._stochastic
        if self._memory is not None:
            restore(self._memory, self._layout, flat, scale)
            scale = 1.0
        first = stream(self._seed, step, self._rank, OWN)
        kernels.encode(flat, self._others, self._sent, stream=first, scale=scale, stochastic=stochastic)
        if self._memory is not None:
            owed = flat.clone()
            kernels.decode(self._sent, self._others, owed)
        yield started(
            dist.all_to_all_single(
                self._received,
                self._sent,
                self._receive_sizes,
                self._send_sizes,
                group=self._groups[0],
                async_op=True,
            )
        )
        payloads = rows(self._received, self._mine.nbytes)
        sums = self._sums[: self._mine.nbytes]
        second = stream(self._seed, step, self._rank, REDUCED)
        if self._memory is not None:
            carried(owed)
            # The sum itself is needed to know what its encoding left out: no fused form.
            for payload in payloads:
                kernels.decode(payload, self._mine, flat, add=True)
            meant = flat.clone()
            kernels.encode(flat, self._mine, sums, stream=second, stochastic=stochastic)
            kernels.decode(sums, self._mine, flat)
            for segment in self._mine.segments:
                own = slice(segment.offset, segment.offset + segment.numel)
                owed[own] = flat[own]
            keep(self._memory, self._layout, meant, owed)
        else:
            kernels.reduce_encode(
                flat, payloads, self._mine, sums, stream=second, scale=scale, stochastic=stochastic
            )
        yield started(all_gather_single(self._gathered, self._sums, self._groups[1], async_op=True))
        for rank, row in enumerate(rows(self._gathered, self._sums.numel())):
            chunk = self._layout.chunks[rank]
            if rank != self._rank and chunk.nbytes:
                kernels.decode(row[: chunk.nbytes], chunk, flat)


class AllGather(BlockReduction):
    """Each rank sends its whole bucket, encoded, to all others; everyone adds them up.

    Every value is quantized once and one collective's latency is paid; payload sent per rank:
    (W - 1) times the bucket's. Right for two ranks, and for tiny buckets.
    """

    def _allocate(self) -> None:
        (self._whole,) = self._layout.chunks
        self._mine = self._bytes(self._whole.nbytes)
        self._gathered = self._bytes(self._world * self._whole.nbytes)

    def steps(self, flat: torch.Tensor, *, step: int, scale: float) -> Iterator[dist.Work]:
        """1. encode everything; all-gather.
        2. decode and add all ranks' codes, in rank order.
        """
        if self._memory is not None:
            restore(self._memory, self._layout, flat, scale)
            scale = 1.0
        key = stream(self._seed, step, self._rank, OWN)
        self._kernels.encode(
            flat, self._whole, self._mine, stream=key, scale=scale, stochastic=self._stochastic
        )
        if self._memory is not None:
            sent = torch.empty_like(flat)
            self._kernels.decode(self._mine, self._whole, sent)
            keep(self._memory, self._layout, flat, sent)
        yield started(all_gather_single(self._gathered, self._mine, self._groups[0], async_op=True))
        for rank, payload in enumerate(rows(self._gathered, self._whole.nbytes)):
            self._kernels.decode(payload, self._whole, flat, add=rank > 0)


def rows(buffer: torch.Tensor, size: int) -> list[torch.Tensor]:
    """A buffer of payloads of one size, cut into them."""
    return list(buffer.view(-1, size).unbind()) if size else []


def restore(memory: ErrorFeedback, layout: Layout, flat: torch.Tensor, scale: float) -> None:
    """Scale the bucket, and add what earlier steps left out."""
    if scale != 1.0:
        flat.mul_(scale)
    for piece in layout.pieces:
        if piece.bits != RAW:
            memory.restore(piece.name, flat[piece.offset : piece.offset + piece.numel])


def keep(memory: ErrorFeedback, layout: Layout, meant: torch.Tensor, sent: torch.Tensor) -> None:
    """Remember what this step left out."""
    for piece in layout.pieces:
        if piece.bits != RAW:
            part = slice(piece.offset, piece.offset + piece.numel)
            memory.keep(piece.name, meant[part], sent[part])
