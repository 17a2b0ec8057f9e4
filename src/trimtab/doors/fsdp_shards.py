"""Compressed collectives over shards: reduce-scatter of gradients, all-gather of weights.

A group of parameters travels as one flat buffer of `world` chunks, chunk r holding every parameter's
shard r, padded to the same sizes on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import Packing
from trimtab.collectives import Piece
from trimtab.collectives.reduction import started
from trimtab.random_bits import OWN, stream


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """The packings of a buffer of chunks; computed once for a rank, applied every step."""

    chunk: int
    """Values in a chunk."""

    mine: Packing
    """One chunk."""

    others: Packing
    """Every chunk but this rank's, in the whole buffer: in rank order, so one run of bytes for each rank."""


def plan_shards(shards: Sequence[Piece], dtype: torch.dtype, world: int, rank: int) -> ShardLayout:
    """The layout of a buffer of `world` chunks, as `rank` sends it; `shards` are the parameters' parts of a chunk."""
    chunk = sum(shard.numel for shard in shards)

    def segments(owner: int, base: int) -> list[Piece]:
        # Blocks are numbered through the whole parameter, so that no two chunks draw the same numbers.
        return [replace(s, offset=base + s.offset, first_block=owner * s.blocks) for s in shards]

    others = [s for owner in range(world) if owner != rank for s in segments(owner, owner * chunk)]
    return ShardLayout(
        chunk=chunk,
        mine=Packing(segments=tuple(segments(rank, 0)), dtype=dtype),
        others=Packing(segments=tuple(others), dtype=dtype),
    )


def reduce_scatter(
    output: torch.Tensor,
    values: torch.Tensor,
    layout: ShardLayout,
    group: dist.ProcessGroup,
    *,
    key: int,
    scale: float,
    stochastic: bool,
) -> None:
    """Leave in `output` this rank's chunk of the sum over ranks of `scale` × `values`.

    1. encode every chunk but mine; all-to-all the codes to their owners.
    2. add what arrived, in rank order, to my own exact values.

    Every value is quantized once, except the owner's own, which stay exact.
    """
    world, rank = group.size(), group.rank()
    kernels = kernels_for(values.device)
    size = layout.mine.nbytes
    sent = torch.empty((world - 1) * size, dtype=torch.uint8, device=values.device)
    received = torch.empty_like(sent)
    kernels.encode(values, layout.others, sent, stream=key, scale=scale, stochastic=stochastic)
    sizes = [0 if r == rank else size for r in range(world)]
    work = dist.all_to_all_single(received, sent, sizes, sizes, group=group, async_op=True)
    own = values[rank * layout.chunk : (rank + 1) * layout.chunk]
    torch.mul(own, scale, out=output)
    started(work).wait()
    for payload in received.view(world - 1, -1).unbind():
        kernels.decode(payload, layout.mine, output, add=True)


class WeightGather(dist.Work):
    """An all-gather of weights rounded to few bits; `wait` decodes them, the same bits on every rank.

    The owner decodes too, so that all ranks compute with the same weights.
    """

    def __init__(
        self, output: torch.Tensor, values: torch.Tensor, layout: ShardLayout, group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self._output, self._layout = output, layout
        kernels = kernels_for(values.device)
        self._payload = torch.empty(layout.mine.nbytes, dtype=torch.uint8, device=values.device)
        self._gathered = torch.empty(
            group.size() * layout.mine.nbytes, dtype=torch.uint8, device=values.device
        )
        # Rounded to the nearest, the forward and the backward pass of a step see the same weights.
        kernels.encode(values, layout.mine, self._payload, stream=0, stochastic=False)
        self._work = started(all_gather_single(self._gathered, self._payload, group, async_op=True))
        self._decoded = False

    def wait(self, timeout: Any = None) -> bool:
        """Until the weights are there (CPU), or until the current stream may use them (CUDA)."""
        if not self._decoded:
            self._work.wait()
            kernels = kernels_for(self._output.device)
            chunks = self._output.view(-1, self._layout.chunk).unbind()
            rows = self._gathered.view(-1, self._layout.mine.nbytes).unbind()
            for chunk, row in zip(chunks, rows, strict=True):
                kernels.decode(row, self._layout.mine, chunk)
            self._decoded = True
        return True

    def is_completed(self) -> bool:
        return self._decoded


def gradient_key(seed: int, step: int) -> int:
    """The random stream of this rank's gradients: by global rank, since replicas of a shard must differ too."""
    return stream(seed, step, dist.get_rank(), OWN)
