"""Reductions of block-quantized buckets: scatter-reduce-allgather, and all-gather.

Both leave every rank with the same bits, because every rank, the owner of a value included,
keeps what was *decoded* from the bytes on the wire, and sums run in rank order.
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
    """Base class of the reductions of a bucket: its layout, the groups, and how values are encoded."""

    def __init__(
        self,
        layout: Layout,
        groups: Sequence[dist.ProcessGroup],
        kernels: Kernels,
        *,
        seed: int,
        stochastic: bool,
        device: torch.device,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        self._layout, self._groups, self._device = layout, groups, device
        self._kernels, self._seed, self._stochastic, self._feedback = kernels, seed, stochastic, feedback
        self._rank, self._world = dist.get_rank(groups[0]), dist.get_world_size(groups[0])
        self._allocate()

    def _allocate(self) -> None:
        """Make the payload buffers, which every step uses again."""
        raise NotImplementedError

    def _restore(self, flat: torch.Tensor, scale: float) -> tuple[float, torch.Tensor | None]:
        """With error feedback: scale the bucket, add what earlier steps left out, and copy the result.

        Returns the scale that is still to be applied, and the copy: the values that should arrive.
        """
        if self._feedback is None:
            return scale, None
        if scale != 1.0:
            flat.mul_(scale)
        for part, name in self._compressed_parts():
            self._feedback.restore(name, flat[part])
        return 1.0, flat.clone()

    def _keep(self, target: torch.Tensor | None, sent: torch.Tensor) -> None:
        """With error feedback: remember for the next step what `sent` lacks of `target`."""
        if self._feedback is not None and target is not None:
            carried(target)
            for part, name in self._compressed_parts():
                self._feedback.keep(name, target[part], sent[part])

    def _compressed_parts(self) -> Iterator[tuple[slice, str]]:
        for piece in self._layout.pieces:
            if piece.bits != RAW:
                yield slice(piece.offset, piece.offset + piece.numel), piece.name

    def _decode_sums(self, gathered: torch.Tensor, row_bytes: int, flat: torch.Tensor) -> None:
        """Decode the chunks that the other ranks own, each from its row of what was gathered."""
        for rank, row in enumerate(rows(gathered, row_bytes)):
            chunk = self._layout.chunks[rank]
            if rank != self._rank and chunk.nbytes:
                self._kernels.decode(row[: chunk.nbytes], chunk, flat)

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
        target: torch.Tensor | None,
    ) -> None:
        """Add `payloads` to `scale` × `flat`, encode the sums, and leave them decoded in `flat`.

        With `target`, where error feedback needs it, the exact sums are stored there.
        """
        kernels, stochastic = self._kernels, self._stochastic
        if target is None:
            kernels.reduce_encode(
                flat, payloads, packing, out, stream=stream, scale=scale, stochastic=stochastic
            )
            return
        assert scale == 1.0, "the residuals were added to values that were scaled before"
        for payload in payloads:
            kernels.decode(payload, packing, flat, add=True)
        for segment in packing.segments:
            part = slice(segment.offset, segment.offset + segment.numel)
            target[part] = flat[part]
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
        scale, target = self._restore(flat, scale)
        first = stream(self._seed, step, self._rank, OWN)
        kernels.encode(flat, self._others, self._sent, stream=first, scale=scale, stochastic=stochastic)
        if target is not None:  # what the owners receive; the last step overwrites it
            kernels.decode(self._sent, self._others, flat)
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
        self._encode_sum(flat, payloads, self._mine, sums, stream=second, scale=scale, target=target)
        self._keep(target, flat)
        yield started(all_gather_single(self._gathered, self._sums, self._groups[1], async_op=True))
        self._decode_sums(self._gathered, self._sums.numel(), flat)


class AllGather(BlockReduction):
    """Each rank sends its whole bucket, encoded, to all others; everyone adds them up.

    Every value is quantized once, with the latency of one collective; payload sent per rank:
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
        scale, target = self._restore(flat, scale)
        key = stream(self._seed, step, self._rank, OWN)
        self._kernels.encode(
            flat, self._whole, self._mine, stream=key, scale=scale, stochastic=self._stochastic
        )
        if target is not None:
            self._kernels.decode(self._mine, self._whole, flat)
            self._keep(target, flat)
        yield started(all_gather_single(self._gathered, self._mine, self._groups[0], async_op=True))
        for rank, payload in enumerate(rows(self._gathered, self._whole.nbytes)):
            self._kernels.decode(payload, self._whole, flat, add=rank > 0)


def rows(buffer: torch.Tensor, size: int) -> list[torch.Tensor]:
    """The payloads of one size that lie one after another in a buffer."""
    return list(buffer.view(-1, size).unbind()) if size else []
