"""The reduction for any codec: every rank sends its encoding to all others, and adds up what it receives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.codec.codec import Codec, Uncompressed
from trimtab.collectives.reduction import carried, started
from trimtab.random_bits import OWN, stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trimtab.codec.error_feedback import ErrorFeedback
    from trimtab.collectives.layout import Piece


class CodecAllGather:
    """One all-gather of every rank's encoded pieces; sums run in rank order.

    Pieces with 0 bits travel uncompressed.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[Piece, torch.Size]],
        groups: Sequence[dist.ProcessGroup],
        codec: Codec,
        *,
        seed: int,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        self._pieces = [(piece, shape, codec if piece.bits else Uncompressed()) for piece, shape in pieces]
        self._group, self._seed, self._feedback = groups[0], seed, feedback

    def steps(self, flat: torch.Tensor, *, step: int, scale: float) -> Iterator[dist.Work]:
        """1. encode each piece (with what was left out before); all-gather.
        2. decode and add all ranks' pieces, in rank order.
        """
        world, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        if scale != 1.0:
            flat.mul_(scale)
        key = stream(self._seed, step, rank, OWN)
        sent = []
        for piece, shape, codec in self._pieces:
            values = flat[piece.offset : piece.offset + piece.numel]
            if self._feedback is not None and piece.bits:
                self._feedback.restore(piece.name, values)
            payload = codec.encode(values.view(shape), name=piece.name, stream=key)
            if self._feedback is not None and piece.bits:
                self._feedback.keep(piece.name, values, codec.decode(payload, shape, flat.dtype))
            sent.append(payload)
        mine = torch.cat(sent)
        gathered = torch.empty(world * mine.numel(), dtype=torch.uint8, device=flat.device)
        yield started(all_gather_single(gathered, mine, self._group, async_op=True))
        carried(gathered, mine)
        sizes = [payload.numel() for payload in sent]
        for index, row in enumerate(gathered.view(world, -1)):
            for (piece, shape, codec), payload in zip(self._pieces, row.split_with_sizes(sizes), strict=True):
                values = codec.decode(payload.clone(), shape, flat.dtype).view(-1)
                part = flat[piece.offset : piece.offset + piece.numel]
                if index == 0:
                    part.copy_(values)
                else:
                    part.add_(values)
