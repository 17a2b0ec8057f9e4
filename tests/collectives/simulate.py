"""What every reduction must give, to the bit: the same steps in one process, with the reference kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trimtab.codec.reference import ReferenceKernels
from trimtab.collectives import Hosts, Piece, plan_layout
from trimtab.collectives.hierarchy import shards
from trimtab.random_bits import OWN, REDUCED, stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.codec.error_feedback import ErrorFeedback
    from trimtab.codec.packing import Packing

SEED = 5
KERNELS = ReferenceKernels()


def residual_norm(feedback: ErrorFeedback | None) -> float:
    """Of what is left out of the parameter "w"."""
    residual = None if feedback is None else feedback.residual("w")
    return 0.0 if residual is None else float(residual.norm())


def values_of(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def mixed_pieces(numel: int) -> list[Piece]:
    """A bucket with a large, a raw and an odd parameter."""
    cuts = [0, numel // 2, numel // 2 + min(50, numel // 3), numel]
    return [
        Piece(name=f"p{i}", offset=cuts[i], numel=cuts[i + 1] - cuts[i], bits=bits, block=64)
        for i, bits in enumerate([4, 0, 3])
    ]


def encode(values: torch.Tensor, packing: Packing, rank: int, step: int, scale: float) -> torch.Tensor:
    payload = torch.zeros(packing.nbytes, dtype=torch.uint8)
    KERNELS.encode(values, packing, payload, stream=stream(SEED, step, rank, OWN), scale=scale)
    return payload


def encode_sum(
    values: torch.Tensor, came: Sequence[torch.Tensor], packing: Packing, key: int, scale: float
) -> torch.Tensor:
    payload = torch.zeros(packing.nbytes, dtype=torch.uint8)
    KERNELS.reduce_encode(values.clone(), came, packing, payload, stream=key, scale=scale)
    return payload


def all_gather(
    values: Sequence[torch.Tensor], pieces: Sequence[Piece], step: int, scale: float
) -> torch.Tensor:
    (whole,) = plan_layout(pieces, values[0].dtype, 1).chunks
    result = torch.zeros_like(values[0])
    for rank, own in enumerate(values):
        KERNELS.decode(encode(own, whole, rank, step, scale), whole, result, add=rank > 0)
    return result


def scatter_reduce(
    values: Sequence[torch.Tensor],
    pieces: Sequence[Piece],
    step: int,
    scale: float,
    spared: Sequence[int] = (),
) -> torch.Tensor:
    result = torch.zeros_like(values[0])
    for owner, chunk in enumerate(plan_layout(pieces, values[0].dtype, len(values), spared).chunks):
        came = [encode(v, chunk, rank, step, scale) for rank, v in enumerate(values) if rank != owner]
        key = stream(SEED, step, owner, REDUCED)
        KERNELS.decode(encode_sum(values[owner], came, chunk, key, scale), chunk, result)
    return result


def ring(values: Sequence[torch.Tensor], pieces: Sequence[Piece], step: int, scale: float) -> torch.Tensor:
    world = len(values)
    result = torch.zeros_like(values[0])
    for owner, chunk in enumerate(plan_layout(pieces, values[0].dtype, world).chunks):
        came: list[torch.Tensor] = []
        for hop in range(1, world + 1):
            rank = (owner + hop) % world
            key = stream(SEED, step, rank, REDUCED if rank == owner else OWN)
            came = [encode_sum(values[rank], came, chunk, key, scale)]
        KERNELS.decode(came[0], chunk, result)
    return result


def tree(values: Sequence[torch.Tensor], pieces: Sequence[Piece], step: int, scale: float) -> torch.Tensor:
    world = len(values)
    (whole,) = plan_layout(pieces, values[0].dtype, 1).chunks

    def up(rank: int, span: int) -> torch.Tensor:
        """The encoded sum of ranks `rank` to `rank` + `span` - 1."""
        came, distance = [], 1
        while distance < span:
            if rank + distance < world:
                came.append(up(rank + distance, distance))
            distance *= 2
        key = stream(SEED, step, rank, OWN if rank else REDUCED)
        return encode_sum(values[rank], came, whole, key, scale)

    result = torch.zeros_like(values[0])
    KERNELS.decode(up(0, 1 << (world - 1).bit_length()), whole, result)
    return result


def halving(values: Sequence[torch.Tensor], pieces: Sequence[Piece], step: int, scale: float) -> torch.Tensor:
    owners = 1 << len(values).bit_length() - 1
    held = [v * scale for v in values]
    result = torch.zeros_like(values[0])
    for owner, chunk in enumerate(plan_layout(pieces, values[0].dtype, owners).chunks):
        for guest in range(owners, len(values)):
            KERNELS.decode(
                encode(held[guest], chunk, guest, step, 1.0), chunk, held[guest - owners], add=True
            )
        holders, distance = list(range(owners)), owners // 2
        while distance:
            holders = [rank for rank in holders if rank & distance == owner & distance]
            for rank in holders:
                came = encode(held[rank ^ distance], chunk, rank ^ distance, step, 1.0)
                KERNELS.decode(came, chunk, held[rank], add=True)
            distance //= 2
        key = stream(SEED, step, owner, REDUCED)
        KERNELS.decode(encode_sum(held[owner], [], chunk, key, 1.0), chunk, result)
    return result


METHODS: dict[str, Callable[..., torch.Tensor]] = {
    "all_gather": all_gather,
    "scatter_reduce": scatter_reduce,
    "ring": ring,
    "tree": tree,
    "halving": halving,
}


def local_sum(values: Sequence[torch.Tensor], scale: float) -> torch.Tensor:
    """Scaled values added in rank order, in fp32 (fp64 for fp64), rounded once to the type."""
    dtype = values[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scaled = [(v * scale).to(wide) for v in values]
    total = scaled[0]
    for other in scaled[1:]:
        total = total + other
    return total.to(dtype)


def hierarchy(
    values: Sequence[torch.Tensor],
    hosts: Hosts,
    pieces: Sequence[Piece],
    method: str,
    step: int,
    scale: float,
) -> torch.Tensor:
    sums = {members: local_sum([values[rank] for rank in members], scale) for members in hosts.ranks}
    result = sums[hosts.ranks[0]].clone()
    for index, shard in enumerate(shards(pieces, values[0].dtype, hosts.shards)):
        if hosts.count > 1 and shard.pieces:
            part = slice(*shard.cuts[index : index + 2])
            peers = [sums[members] for members in sorted(hosts.ranks, key=lambda members: members[index])]
            result[part] = METHODS[method](peers, shard.pieces, step, 1.0)[part]
    return result
