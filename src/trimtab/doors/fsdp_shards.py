"""Compressed collectives over shards: reduce-scatter of gradients, all-gather of weights.

A group of parameters travels as one flat buffer of `world` chunks, chunk r holding every parameter's
shard r, padded to the same sizes on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import RAW, Packing, Segment
from trimtab.collectives import Hierarchy, Piece, finish
from trimtab.collectives.duplex import all_gather, all_to_all
from trimtab.doors.loss_scale import running_loss_scale
from trimtab.random_bits import OWN, stream

RESIDUAL_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """The packings of a buffer of chunks; computed once for a rank, applied every step."""

    chunk: int
    """Values in a chunk."""

    mine: Packing
    """One chunk."""

    others: Packing
    """Every chunk but this rank's, in the whole buffer: in rank order, so one run of bytes for each rank."""

    everyone: Packing
    """Every chunk in the whole buffer, likewise: what a gather brings is decoded in one go."""

    residuals: Packing
    """How what a scatter rounds away is kept: of the chunks and parameters that it encodes."""


def plan_shards(shards: Sequence[Piece], dtype: torch.dtype, world: int, rank: int) -> ShardLayout:
    """The layout of a buffer of `world` chunks, as `rank` sends it; `shards` are the parameters' parts of a chunk."""
    chunk = sum(shard.numel for shard in shards)

    def segments(owner: int, base: int) -> list[Piece]:
        # Blocks are numbered through the whole parameter, so that no two chunks draw the same numbers.
        return [replace(s, offset=base + s.offset, first_block=owner * s.blocks) for s in shards]

    def packed(*owners: int) -> Packing:
        return Packing(segments=tuple(s for r in owners for s in segments(r, r * chunk)), dtype=dtype)

    others = packed(*(owner for owner in range(world) if owner != rank))
    return ShardLayout(
        chunk=chunk,
        mine=Packing(segments=tuple(segments(rank, 0)), dtype=dtype),
        others=others,
        everyone=packed(*range(world)),
        residuals=_in_eight_bits(others),
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
    feedback: tuple[ScatterFeedback, str] | None = None,
) -> None:
    """Leave in `output` this rank's chunk of the sum over ranks of `scale` × `values`.

    1. encode every chunk but mine; all-to-all the codes to their owners.
    2. add what arrived, in rank order, to my own exact values.

    Every value is quantized once, except the owner's own, which stay exact. `feedback` and the key of this buffer in
    it carry over what is rounded away; `values` are overwritten then.
    """
    world, rank = group.size(), group.rank()
    kernels = kernels_for(values.device)
    size = layout.mine.nbytes
    sent = torch.empty((world - 1) * size, dtype=torch.uint8, device=values.device)
    received = torch.empty_like(sent)
    if feedback is not None:
        values.mul_(scale)
        scale = 1.0
        feedback[0].restore(feedback[1], values, layout)
    kernels.encode(values, layout.others, sent, stream=key, scale=scale, stochastic=stochastic)
    if feedback is not None:
        feedback[0].keep(feedback[1], values, sent, layout)
    sizes = [0 if r == rank else size for r in range(world)]
    work = all_to_all(received, sent, sizes, sizes, group, in_stream=True)
    own = values[rank * layout.chunk : (rank + 1) * layout.chunk]
    torch.mul(own, scale, out=output)
    work.wait()
    for payload in received.view(world - 1, -1).unbind():
        kernels.decode(payload, layout.mine, output, add=True)


class ScatterFeedback:
    """What reduce-scatters rounded away, by buffer: in 8 bits, since it has the size of all gradients on every rank.

    What 8 bits round away of it is lost: up to a 500th of a block's range. A residual that is not finite is dropped.
    """

    def __init__(self) -> None:
        self._residuals: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        """By key: the encoded residual, and the loss scale of its values."""

    def restore(self, key: str, values: torch.Tensor, layout: ShardLayout) -> None:
        """Add, in place, what the last reduce-scatter of this buffer left out."""
        packing = layout.residuals
        payload, before = self._residuals.get(key, (None, None))
        if payload is None or payload.numel() != packing.nbytes:
            return
        missing, now = torch.zeros_like(values), running_loss_scale()
        kernels_for(values.device).decode(payload, packing, missing)
        if before is not now:
            missing.mul_((1.0 if now is None else now) / (1.0 if before is None else before))
        values.add_(missing)

    def keep(self, key: str, values: torch.Tensor, sent: torch.Tensor, layout: ShardLayout) -> None:
        """Keep what `sent` lacks of `values`."""
        kernels, packing = kernels_for(values.device), layout.residuals
        arrives = torch.zeros_like(values)
        kernels.decode(sent, layout.others, arrives)
        missing = torch.sub(values, arrives, out=arrives)
        missing.masked_fill_(~torch.isfinite(missing.sum()), 0.0)
        payload = torch.empty(packing.nbytes, dtype=torch.uint8, device=values.device)
        kernels.encode(missing, packing, payload, stream=0, stochastic=False)
        self._residuals[key] = payload, running_loss_scale()

    def state_dict(self) -> dict[str, Any]:
        return {
            key: (payload.cpu().clone(), None if scale is None else float(scale))
            for key, (payload, scale) in self._residuals.items()
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._residuals = {
            key: (payload.to(device), None if scale is None else torch.tensor(scale, device=device))
            for key, (payload, scale) in state.items()
        }


def _in_eight_bits(packing: Packing) -> Packing:
    """The encoded segments of a packing, in 8 bits."""
    coded = [s for s in packing.segments if s.bits != RAW]
    segments = tuple(Segment(offset=s.offset, numel=s.numel, bits=8, block=RESIDUAL_BLOCK) for s in coded)
    return Packing(segments=segments, dtype=packing.dtype)


def reduce_scatter_inside(
    output: torch.Tensor, values: torch.Tensor, host: Hierarchy, *, scale: float
) -> None:
    """As `reduce_scatter` between the ranks of one host, exactly; this rank's chunk of `values` is overwritten."""
    cuts = [output.numel() * rank for rank in range(host.inside.world + 1)]
    finish(host.inside.reduce_scatter(values, cuts, scale))
    output.copy_(values[cuts[host.index] : cuts[host.index + 1]])


def all_gather_inside(output: torch.Tensor, values: torch.Tensor, host: Hierarchy) -> None:
    """Every rank's `values`, in rank order, in `output`, between the ranks of one host."""
    cuts = [values.numel() * rank for rank in range(host.inside.world + 1)]
    own = output[cuts[host.index] : cuts[host.index + 1]]
    if own.data_ptr() != values.data_ptr():
        own.copy_(values)
    finish(host.inside.all_gather(output, cuts))


class WeightGather(dist.Work):
    """An all-gather of weights rounded to few bits; `wait` decodes them, the same bits on every rank.

    The owner decodes too, so that all ranks compute with the same weights.
    """

    def __init__(
        self,
        output: torch.Tensor,
        values: torch.Tensor,
        layout: ShardLayout,
        group: dist.ProcessGroup,
        *,
        in_stream: bool = False,
    ) -> None:
        """`in_stream`: the stream that calls this is also the one that waits (`collectives.duplex`)."""
        super().__init__()
        self._output, self._layout = output, layout
        kernels = kernels_for(values.device)
        self._payload = torch.empty(layout.mine.nbytes, dtype=torch.uint8, device=values.device)
        self._gathered = torch.empty(
            group.size() * layout.mine.nbytes, dtype=torch.uint8, device=values.device
        )
        # Rounded to the nearest, the forward and the backward pass of a step see the same weights.
        kernels.encode(values, layout.mine, self._payload, stream=0, stochastic=False)
        self._work = all_gather(
            self._gathered, self._payload, group, in_stream=in_stream, ahead=not in_stream
        )
        self._decoded = False

    def wait(self, timeout: Any = None) -> bool:
        """Until the weights are there (CPU), or until the current stream may use them (CUDA)."""
        if not self._decoded:
            self._work.wait()
            kernels = kernels_for(self._output.device)
            kernels.decode(self._gathered, self._layout.everyone, self._output.view(-1))
            self._decoded = True
        return True

    def is_completed(self) -> bool:
        return self._decoded


def gradient_key(seed: int, step: int) -> int:
    """The random stream of this rank's gradients: by global rank, since replicas of a shard must differ too."""
    return stream(seed, step, dist.get_rank(), OWN)
