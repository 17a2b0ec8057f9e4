"""Exchanges of values that may be on a GPU over process groups between the hosts' memories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from trimtab.codec import Codec, ErrorFeedback
from trimtab.codec.host_payloads import HostPayloads
from trimtab.codec.kernels import kernels_for
from trimtab.collectives import Piece, Reduction, reduction_for
from trimtab.local.workers import HOST


def host_reduction(
    pieces: Sequence[tuple[Piece, torch.Size]],
    device: torch.device,
    groups: Sequence[dist.ProcessGroup],
    codec: Codec,
    *,
    seed: int,
    feedback: ErrorFeedback | None,
) -> Reduction:
    """The reduction of fp32 values on a device whose payloads travel between the hosts' memories."""
    kernels = kernels_for(device)
    if device.type != "cpu":
        kernels = HostPayloads(kernels)
    return reduction_for(
        pieces, torch.float32, HOST, groups, codec, seed=seed, feedback=feedback, kernels=kernels
    )


def in_stream(steps: Iterator[dist.Work], stream: torch.cuda.Stream) -> Iterator[dist.Work]:
    """The same steps, whose kernels and copies are queued in a stream, whichever thread runs them."""
    while True:
        # Not around the `yield`: the next step may run in another thread, which has a current stream of its own.
        with torch.cuda.stream(stream):
            work = next(steps, None)
        if work is None:
            return
        yield work


def streams_for(device: torch.device, count: int) -> list[torch.cuda.Stream | None]:
    """Streams for what is computed beside the training: short kernels that need not wait for its long ones."""
    return [torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None for _ in range(count)]
