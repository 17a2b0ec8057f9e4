"""Reductions for codecs that need whole tensors: PowerSGD's, which sums thin factors, and one for any codec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.codec.codec import Codec, Uncompressed
from trimtab.codec.error_feedback import ErrorFeedback
from trimtab.codec.powersgd import PowerSGD, matrix_shape, orthonormal, start
from trimtab.collectives.layout import Piece
from trimtab.collectives.reduction import carried, started
from trimtab.random_bits import OWN, name_hash, stream


class LowRankReduction:
    """Two all-reduces of thin fp32 factors; each step starts from the right factors of the step before.

    Pieces whose factors would not be smaller than themselves travel uncompressed, in the first all-reduce.
    `rights` holds the right factors by parameter name; all reductions of a job share it.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[Piece, torch.Size]],
        groups: Sequence[dist.ProcessGroup],
        codec: PowerSGD,
        *,
        seed: int,
        feedback: ErrorFeedback,
        rights: dict[str, torch.Tensor],
    ) -> None:
        self._groups, self._seed, self._feedback, self._rights = groups, seed, feedback, rights
        self._matrices: list[tuple[Piece, tuple[int, int], int]] = []
        self._raw: list[Piece] = []
        for piece, shape in pieces:
            rows, columns = matrix_shape(shape)
            rank = codec.rank_for(shape)
            if piece.bits and rank * (rows + columns) < rows * columns:
                self._matrices.append((piece, (rows, columns), rank))
            else:
                self._raw.append(piece)

    def steps(self, flat: torch.Tensor, *, step: int, scale: float) -> Iterator[dist.Work]:
        """1. left factors of (values + what was left out before); all-reduce them with the raw pieces.
        2. orthonormalize; right factors; all-reduce them.
        3. multiply; keep what this rank's values had beyond the product as error feedback.
        """
        world = dist.get_world_size(self._groups[0])
        if scale != 1.0:
            flat.mul_(scale)
        matrices = []
        for piece, shape, _ in self._matrices:
            values = flat[piece.span]
            self._feedback.restore(piece.name, values)
            matrices.append(values.float().view(shape))
        starts = [self._right(piece, shape[1], rank, flat.device) for piece, shape, rank in self._matrices]
        lefts = [matrix @ right for matrix, right in zip(matrices, starts, strict=True)]
        first = _join([*lefts, *(flat[piece.span].float() for piece in self._raw)], flat)
        yield started(dist.all_reduce(first, group=self._groups[0], async_op=True))
        carried(first, *matrices)
        parts = first.split_with_sizes(
            [left.numel() for left in lefts] + [piece.numel for piece in self._raw]
        )
        for piece, part in zip(self._raw, parts[len(lefts) :], strict=True):
            flat[piece.span].copy_(part)
        bases = [orthonormal(part.view_as(left)) for part, left in zip(parts, lefts, strict=False)]
        rights = [matrix.T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        second = _join(rights, flat)
        yield started(dist.all_reduce(second, group=self._groups[-1], async_op=True))
        carried(second, *matrices, *bases)
        summed = second.split_with_sizes([right.numel() for right in rights])
        for (piece, _, _), matrix, basis, right, part, before in zip(
            self._matrices, matrices, bases, rights, summed, starts, strict=True
        ):
            product = basis @ part.view_as(right).T
            # Each rank contributed 1/W of the product; the rest of its own values is the residual.
            self._feedback.keep(piece.name, matrix, product / world)
            # Nothing can be learned from a matrix that was zero on every rank: keep the last factor.
            self._rights[piece.name] = torch.where(part.any(), part.view_as(right), before)
            flat[piece.span].copy_(product.view(-1))

    def _right(self, piece: Piece, columns: int, rank: int, device: torch.device) -> torch.Tensor:
        right = self._rights.get(piece.name)
        if right is None or not bool(torch.isfinite(right).all()):
            key = stream(self._seed, 0, 0, 0) ^ name_hash(piece.name)
            right = start(columns, rank, key, device)
        return right


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
            values = flat[piece.span]
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
                part = flat[piece.span]
                if index == 0:
                    part.copy_(values)
                else:
                    part.add_(values)


def _join(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    if not parts:
        return torch.zeros(0, dtype=torch.float32, device=like.device)
    return torch.cat([part.reshape(-1) for part in parts])
