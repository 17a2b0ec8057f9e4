"""Measure the job's own link: the same values exchanged uncompressed and compressed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from trimtab.codec import Block, ErrorFeedback, Uncompressed
from trimtab.codec.packing import RAW
from trimtab.collectives import Hierarchy, Method, Piece, finish, reduction_for
from trimtab.collectives.duplex import all_gather
from trimtab.doors.fsdp_shards import WeightGather, plan_shards
from trimtab.measure.timing import slowest_seconds
from trimtab.predict.exchange import Exchange
from trimtab.wire_format import WEIGHT_BLOCK

SMALLEST, LARGEST = 1 << 18, 1 << 22
"""Elements of the trial exchange, which grows until it takes long enough to time."""

LONG_ENOUGH_S = 0.03
REPEATS = 5


def measure_exchange(
    codec: Block | Uncompressed,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    numel: int = LARGEST,
    *,
    hierarchy: Hierarchy | None = None,
) -> Exchange:
    """Time the backend's exchange of a trial buffer and one by a codec: `measure_exchanges` of one codec."""
    return measure_exchanges({"": (codec, False)}, groups, device, numel, hierarchy=hierarchy)[""]


def measure_exchanges(
    codecs: Mapping[str, tuple[Block | Uncompressed, bool]],
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    numel: int = LARGEST,
    *,
    repeats: int = REPEATS,
    hierarchy: Hierarchy | None = None,
    method: Method | None = None,
) -> dict[str, Exchange]:
    """Time an uncompressed exchange of a trial buffer and one with each codec, in turn; all ranks get the same times.

    Only `work_s` is each rank's own. Collective: every rank of the groups calls it at the same point. Takes about half
    a second at 100 Mbit/s and less on faster links. The trial never has more elements than the `numel` of the job's
    gradients: the exchange of a small model is mostly latency.

    Args:
        codecs: by name, a codec and whether it has error feedback.
        hierarchy, method: the route of compressed values, as in `reduction_for`.
    """

    def trial(numel: int) -> _Trial:
        generator = torch.Generator(device).manual_seed(numel)
        flat = torch.randn(numel, dtype=torch.float32, device=device, generator=generator)

        def compressed(codec: Block | Uncompressed, feedback: bool) -> Callable[[], None]:
            bits, block = (codec.bits, codec.block) if isinstance(codec, Block) else (RAW, 1024)
            piece = Piece(name="", offset=0, numel=numel, bits=bits, block=block)
            reduction = reduction_for(
                [(piece, flat.shape)],
                flat.dtype,
                device,
                groups,
                codec,
                seed=0,
                feedback=ErrorFeedback() if feedback else None,
                hierarchy=hierarchy,
                method=method,
            )
            scale = 1 / dist.get_world_size(groups[0])
            return lambda: finish(reduction.steps(flat, step=0, scale=scale))

        def plain() -> None:
            dist.all_reduce(flat, group=groups[0])
            flat.mul_(1 / dist.get_world_size(groups[0]))

        return plain, {name: compressed(codec, feedback) for name, (codec, feedback) in codecs.items()}

    times = _timed(trial, min(numel, LARGEST), device, groups[0], repeats)
    return {
        name: Exchange(
            nbytes=times.numel * 4,
            plain_s=times.plain_s,
            compressed_s=times.compressed_s[name],
            bits=getattr(codec, "bits", 32),
            work_s=times.work_s[name],
        )
        for name, (codec, _) in codecs.items()
    }


def measure_gather(
    group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, numel: int, *, bits: int
) -> Exchange:
    """Time FSDP2's gather of `numel` weights at most, exactly and in `bits`, as `measure_exchanges` does. Collective.

    Its bytes are those of all ranks' shards together.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)

    def trial(numel: int) -> _Trial:
        own = max(1, numel // world)
        generator = torch.Generator(device).manual_seed(numel)
        shard = torch.randn(own, dtype=torch.float32, device=device, generator=generator).to(dtype)
        output = torch.empty(own * world, device=device, dtype=dtype)
        piece = Piece(name="", offset=0, numel=own, bits=bits, block=WEIGHT_BLOCK)
        layout = plan_shards([piece], dtype, world, rank)

        def plain() -> None:
            work = all_gather(output, shard, group)
            work.wait()

        def compressed() -> None:
            WeightGather(output, shard, layout, group).wait()

        return plain, {"": compressed}

    times = _timed(trial, min(numel, LARGEST), device, group, REPEATS)
    return Exchange(
        nbytes=times.numel * dtype.itemsize,
        plain_s=times.plain_s,
        compressed_s=times.compressed_s[""],
        bits=bits,
        work_s=times.work_s[""],
    )


_Trial = tuple[Callable[[], None], Mapping[str, Callable[[], None]]]
"""A plain exchange of a trial buffer, and others by name."""


@dataclass(frozen=True, kw_only=True)
class _Times:
    """Of exchanges of so many values: medians in seconds, and this rank's own work in them."""

    numel: int
    plain_s: float
    compressed_s: dict[str, float]
    work_s: dict[str, float]


def _timed(
    trial: Callable[[int], _Trial], largest: int, device: torch.device, group: dist.ProcessGroup, repeats: int
) -> _Times:
    """Time the exchanges of a trial, which grows until its plain one takes long enough."""
    numel = min(largest, SMALLEST)
    while True:
        plain, runs = trial(numel)
        for run in runs.values():
            slowest_seconds(run, device, group)  # the first call opens connections and fills caches
        first = slowest_seconds(plain, device, group)
        if first >= LONG_ENOUGH_S or numel >= largest:
            break
        numel = min(numel * 4, largest)
    times = []
    work = dict.fromkeys(runs, 0.0)
    for _ in range(repeats):
        plain_s, each_s = slowest_seconds(plain, device, group), {}
        for name, run in runs.items():
            before = time.process_time()
            each_s[name] = slowest_seconds(run, device, group)
            work[name] += 0.0 if device.type == "cuda" else time.process_time() - before
        times.append((plain_s, each_s))
    return _Times(
        numel=numel,
        plain_s=median(plain_s for plain_s, _ in times),
        compressed_s={name: median(each[name] for _, each in times) for name in runs},
        work_s={name: work[name] / repeats for name in runs},
    )
