"""Measure the job's own link: the same values exchanged uncompressed and compressed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
import torch.distributed as dist

from trimtab.codec import Block, ErrorFeedback, Uncompressed
from trimtab.codec.packing import RAW
from trimtab.collectives import Hierarchy, Method, Piece, finish, reduction_for
from trimtab.measure.timing import slowest_seconds
from trimtab.predict.exchange import Exchange

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
    largest = min(numel, LARGEST)
    numel = min(numel, SMALLEST)

    def compressed(codec: Block | Uncompressed, feedback: bool, flat: torch.Tensor) -> Callable[[], None]:
        bits, block = (codec.bits, codec.block) if isinstance(codec, Block) else (RAW, 1024)
        piece = Piece(name="", offset=0, numel=flat.numel(), bits=bits, block=block)
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

    while True:
        flat = torch.randn(numel, device=device, generator=torch.Generator(device).manual_seed(numel))
        runs = {name: compressed(codec, feedback, flat) for name, (codec, feedback) in codecs.items()}

        def plain(flat: torch.Tensor = flat) -> None:
            dist.all_reduce(flat, group=groups[0])
            flat.mul_(1 / dist.get_world_size(groups[0]))

        for run in runs.values():
            slowest_seconds(run, device, groups[0])  # the first call opens connections and fills caches
        first = slowest_seconds(plain, device, groups[0])
        if first >= LONG_ENOUGH_S or numel >= largest:
            break
        numel = min(numel * 4, largest)
    times = []
    work = dict.fromkeys(runs, 0.0)
    for _ in range(repeats):
        plain_s, each_s = slowest_seconds(plain, device, groups[0]), []
        for name, run in runs.items():
            before = time.process_time()
            each_s.append(slowest_seconds(run, device, groups[0]))
            work[name] += 0.0 if device.type == "cuda" else time.process_time() - before
        times.append((plain_s, each_s))
    return {
        name: Exchange(
            nbytes=numel * 4,
            plain_s=median(plain_s for plain_s, _ in times),
            compressed_s=median(each[i] for _, each in times),
            bits=getattr(codecs[name][0], "bits", 32),
            work_s=work[name] / repeats,
        )
        for i, name in enumerate(codecs)
    }
