"""Reductions of block-quantized buckets: scatter-reduce-allgather, all-gather, ring and tree.

All leave every rank with the same bits, because every rank, the owner of a value included,
keeps what was *decoded* from the bytes on the wire, and sums run in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from trimtab.codec.contract import Kernels
from trimtab.codec.error_feedback import ErrorFeedback
from trimtab.codec.packing import RAW, Packing
from trimtab.collectives.duplex import all_gather, all_to_all, exchange
from trimtab.collectives.layout import Layout
from trimtab.collectives.reduction import Works, carried, started
from trimtab.random_bits import OWN, REDUCED, stream


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
        self._compressed = [piece for piece in layout.pieces if piece.bits != RAW]
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
        for piece in self._compressed:
            self._feedback.restore(piece.name, flat[piece.span])
        return 1.0, flat.clone()

    def _keep(self, target: torch.Tensor | None, sent: torch.Tensor) -> None:
        """With error feedback: remember for the next step what `sent` lacks of `target`."""
        if self._feedback is not None and target is not None:
            carried(target)
            for piece in self._compressed:
                self._feedback.keep(piece.name, target[piece.span], sent[piece.span])

    def _decode_sums(self, gathered: torch.Tensor, row_bytes: int, flat: torch.Tensor) -> None:
        """Decode the chunks that the other ranks own, each from its row of what was gathered."""
        for rank, row in enumerate(rows(gathered, row_bytes)):
            chunk = self._layout.chunks[rank]
            if rank != self._rank and chunk.nbytes:
                self._kernels.decode(row[: chunk.nbytes], chunk, flat)

    def _bytes(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._device, pin_memory=self._kernels.pinned)

    def _transfer(
        self,
        stage: int,
        send: tuple[torch.Tensor, int] | None = None,
        receive: tuple[torch.Tensor, int] | None = None,
    ) -> dist.Work:
        """Send to a rank and receive from one; what is empty is left out, on both sides."""
        sent, received = ([] if pair is None else [pair] for pair in (send, receive))
        return exchange(self._device, self._groups[stage], sent, received)

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
            target[segment.span] = flat[segment.span]
        kernels.encode(flat, packing, out, stream=stream, stochastic=stochastic)
        kernels.decode(out, packing, flat)


class ScatterReduceAllGather(BlockReduction):
    """Each rank owns a chunk: it receives everyone's, adds them up, and sends the sum to all.

    Every value is quantized exactly twice. Payload sent per rank: twice (W - 1) / W of the bucket's. Where the layout
    spares ranks, these send the bucket's payload once and receive it once, and own nothing.
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
        if self._layout.spared:
            self._sums, self._gathered = self._bytes(self._mine.nbytes), self._bytes(sum(self._send_sizes))
        else:
            self._sums, self._gathered = self._bytes(row), self._bytes(self._world * row)

    def steps(self, flat: torch.Tensor, *, step: int, scale: float) -> Iterator[dist.Work]:
        """1. encode every chunk but mine; all-to-all the codes to their owners.
        2. add what arrived to my own exact values, encode the sums, keep their decoded form; all-gather. Where ranks
           are spared, all-to-all instead: a ring would pass everything through their links once more.
        3. decode the other owners' sums.
        """
        kernels, stochastic = self._kernels, self._stochastic
        scale, target = self._restore(flat, scale)
        first = stream(self._seed, step, self._rank, OWN)
        kernels.encode(flat, self._others, self._sent, stream=first, scale=scale, stochastic=stochastic)
        if target is not None:  # what the owners receive; the last step overwrites it
            kernels.decode(self._sent, self._others, flat)
        into, out = self._receive_sizes, self._send_sizes
        yield all_to_all(self._received, self._sent, into, out, self._groups[0])
        payloads = rows(self._received, self._mine.nbytes)
        sums = self._sums[: self._mine.nbytes]
        second = stream(self._seed, step, self._rank, REDUCED)
        self._encode_sum(flat, payloads, self._mine, sums, stream=second, scale=scale, target=target)
        self._keep(target, flat)
        if not self._layout.spared:
            yield all_gather(self._gathered, self._sums, self._groups[1])
            self._decode_sums(self._gathered, self._sums.numel(), flat)
            return
        copies = self._sums.repeat(self._world - 1)
        yield all_to_all(self._gathered, copies, out, into, self._groups[1])
        carried(copies)
        # What was gathered has the order of what was sent: all chunks but mine.
        kernels.decode(self._gathered, self._others, flat)


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
        2. decode and add all ranks' codes, in rank order, in one pass.
        """
        scale, target = self._restore(flat, scale)
        key = stream(self._seed, step, self._rank, OWN)
        self._kernels.encode(
            flat, self._whole, self._mine, stream=key, scale=scale, stochastic=self._stochastic
        )
        if target is not None:
            self._kernels.decode(self._mine, self._whole, flat)
            self._keep(target, flat)
        yield all_gather(self._gathered, self._mine, self._groups[0])
        self._kernels.decode_sum(rows(self._gathered, self._whole.nbytes), self._whole, flat)


class Ring(BlockReduction):
    """Chunk c starts at rank c + 1 and travels around the ring; each rank adds its values; rank c owns the sum.

    Every value is encoded by every rank on the way, so the error grows with W. It needs the least memory, and each
    chunk crosses a host's link once, however many ranks the host has. Payload sent per rank: 2 (W - 1) / W of the
    bucket's.
    """

    def _allocate(self) -> None:
        chunks = self._layout.chunks
        assert self._world == len(chunks)
        row = max(chunk.nbytes for chunk in chunks)
        self._leaving, self._arriving = self._bytes(row), self._bytes(row)
        self._sums, self._gathered = self._bytes(row), self._bytes(self._world * row)

    def steps(self, flat: torch.Tensor, *, step: int, scale: float) -> Iterator[dist.Work]:
        """1. W - 1 hops: add my values to the chunk that arrived, encode, send it on.
        2. my own chunk has arrived: add, encode the sums, keep their decoded form; all-gather.
        3. decode the other owners' sums.
        """
        chunks, world, rank = self._layout.chunks, self._world, self._rank
        scale, target = self._restore(flat, scale)
        # Each rank encodes each chunk once, so one stream serves all hops.
        key = stream(self._seed, step, rank, OWN)
        received: list[torch.Tensor] = []
        last: dist.Work = Works(self._device)
        for hop in range(world - 1):
            last.wait()
            chunk, coming = chunks[(rank - 1 - hop) % world], chunks[(rank - 2 - hop) % world]
            leaving, arriving = self._leaving[: chunk.nbytes], self._arriving[: coming.nbytes]
            self._encode_sum(flat, received, chunk, leaving, stream=key, scale=scale, target=target)
            last = self._transfer(0, (leaving, (rank + 1) % world), (arriving, (rank - 1) % world))
            received = [arriving]
        yield last
        own = chunks[rank]
        sums = self._sums[: own.nbytes]
        key = stream(self._seed, step, rank, REDUCED)
        self._encode_sum(flat, received, own, sums, stream=key, scale=scale, target=target)
        self._keep(target, flat)
        yield all_gather(self._gathered, self._sums, self._groups[1])
        self._decode_sums(self._gathered, self._sums.numel(), flat)


class Tree(BlockReduction):
    """Rank 0 is the root; the children of rank r are r + 1, r + 2, r + 4, ... below its lowest set bit.

    Every value is encoded once per level, so the error grows with log W. Latency is lowest, but the whole payload
    passes through the root's link log W times: right for small buckets on many ranks.
    """

    def _allocate(self) -> None:
        (self._whole,) = self._layout.chunks
        self._children, self._parent = family(self._rank, self._world)
        size = self._whole.nbytes
        self._own, self._received = self._bytes(size), [self._bytes(size) for _ in self._children]

    def steps(self, flat: torch.Tensor, *, step: int, scale: float) -> Iterator[dist.Work]:
        """1. receive from my children, nearest first; add, encode, send to my parent.
        2. the root keeps the decoded form of its encoded sum, and broadcasts it.
        3. decode.
        """
        scale, target = self._restore(flat, scale)
        for child, payload in zip(self._children, self._received, strict=True):
            self._transfer(0, receive=(payload, child)).wait()
        key = stream(self._seed, step, self._rank, REDUCED if self._parent is None else OWN)
        self._encode_sum(flat, self._received, self._whole, self._own, stream=key, scale=scale, target=target)
        self._keep(target, flat)
        yield Works(self._device) if self._parent is None else self._transfer(0, (self._own, self._parent))
        yield started(dist.broadcast(self._own, group=self._groups[1], group_src=0, async_op=True))
        if self._parent is not None:
            self._kernels.decode(self._own, self._whole, flat)


def family(rank: int, world: int) -> tuple[list[int], int | None]:
    """A rank's children, nearest first, and its parent (None: the root)."""
    children, distance = [], 1
    while rank % (2 * distance) == 0 and rank + distance < world:
        children.append(rank + distance)
        distance *= 2
    return children, None if rank == 0 else rank & (rank - 1)


def rows(buffer: torch.Tensor, size: int) -> list[torch.Tensor]:
    """The payloads of one size that lie one after another in a buffer."""
    return list(buffer.view(-1, size).unbind()) if size else []
