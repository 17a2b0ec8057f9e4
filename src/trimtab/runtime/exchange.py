"""Measuring the job's own link: the same values exchanged plainly and compressed."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trimtab.collectives import Piece, finish, reduction_for
from trimtab.plan.compression import Exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.codec import Block

SMALLEST, LARGEST = 1 << 18, 1 << 22
"""Elements of the trial exchange: grown until it takes long enough to time, never beyond."""

LONG_ENOUGH_S = 0.03
REPEATS = 5


def measure_exchange(
    codec: Block, groups: Sequence[dist.ProcessGroup], device: torch.device, numel: int = LARGEST
) -> Exchange:
    """Time a plain and a compressed exchange of a trial buffer, alternating; every rank gets the same figures.

    Collective: every rank of the groups calls it at the same point. Takes about half a second at
    100 Mbit/s and less on faster links. The trial never has more elements than the `numel` of the
    job's gradients: a small model's exchange is all latency.
    """
    largest = min(numel, LARGEST)
    numel = min(numel, SMALLEST)
    while True:
        flat = torch.randn(numel, device=device, generator=torch.Generator(device).manual_seed(numel))
        piece = Piece(name="", offset=0, numel=numel, bits=codec.bits, block=codec.block)
        reduction = reduction_for([(piece, flat.shape)], flat.dtype, device, groups, codec, seed=0)

        def plain(flat: torch.Tensor = flat) -> None:
            dist.all_reduce(flat, group=groups[0])

        def compressed(flat: torch.Tensor = flat, reduction=reduction) -> None:  # type: ignore[no-untyped-def]
            finish(reduction.steps(flat, step=0, scale=1.0))

        _timed(compressed, groups, device)  # the first call of each opens connections and fills caches
        first = _timed(plain, groups, device)
        if first >= LONG_ENOUGH_S or numel >= largest:
            break
        numel = min(numel * 4, largest)
    times = [(_timed(plain, groups, device), _timed(compressed, groups, device)) for _ in range(REPEATS)]
    return Exchange(
        nbytes=numel * 4,
        plain_s=median(t for t, _ in times),
        compressed_s=median(t for _, t in times),
        bits=codec.bits,
    )


def _timed(run: Callable[[], None], groups: Sequence[dist.ProcessGroup], device: torch.device) -> float:
    """Seconds until the slowest rank has finished."""
    taken = torch.zeros(1, device=device, dtype=torch.float64)
    dist.all_reduce(taken, group=groups[0])
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    taken += time.perf_counter() - start
    dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=groups[0])
    return float(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
