"""`trimtab bench codec`: what encoding costs, relative to copying the same tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trimtab.bench.harness import AA, Progress, Result, interleave
from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import Packing, Segment
from trimtab.measure.timing import call_seconds

NUMEL = 64 * 1024 * 1024
"""256 MiB of fp32."""

LAUNCHES = 30
"""Launches between two events on a GPU, so that neither a launch nor what the last case left in cache counts."""


def codec(device: str, bits: int, block: int, repeats: int, progress: Progress) -> Result:
    """Encode, decode and add 256 MiB of fp32 in preallocated buffers, one CPU thread or one GPU."""
    torch.set_num_threads(1)
    where = torch.device(device)
    kernels = kernels_for(where)
    packing = Packing(segments=(Segment(offset=0, numel=NUMEL, bits=bits, block=block),), dtype=torch.float32)
    values = torch.randn(NUMEL, device=where)
    target = torch.zeros_like(values)
    payload = torch.zeros(packing.nbytes, dtype=torch.uint8, device=where)
    kernels.encode(values, packing, payload, stream=1)
    other, sums = payload.clone(), torch.zeros_like(payload)

    def encode(stochastic: bool) -> None:
        kernels.encode(values, packing, payload, stream=1, stochastic=stochastic)

    cases: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(values),
        "copy" + AA: lambda: target.copy_(values),
        "encode": lambda: encode(True),
        "encode_nearest": lambda: encode(False),
        "decode": lambda: kernels.decode(payload, packing, target),
        "decode_add": lambda: kernels.decode(payload, packing, target, add=True),
        "reduce_encode": lambda: kernels.reduce_encode(target, [other], packing, sums, stream=1, scale=0.5),
    }
    timed = {name: partial(call_seconds, run, where, gpu_calls=LAUNCHES) for name, run in cases.items()}
    timings = interleave(timed, warmup=3, repeats=repeats, progress=progress)
    gigabytes = NUMEL * 4 / 1e9
    rows = [
        {
            "method": name,
            "ms": timing.median_ms,
            "spread": timing.spread,
            "gb_per_s": gigabytes / (timing.median_ms / 1e3),
            "over_copy": timing.ratio(timings["copy"]),
        }
        for name, timing in timings.items()
    ]
    summary: dict[str, Any] = {
        f"{name}_over_copy": timings[name].ratio(timings["copy"])
        for name in ("encode", "encode_nearest", "decode", "decode_add", "reduce_encode")
    }
    summary |= {"copy_aa": timings["copy" + AA].ratio(timings["copy"]), "kernels": kernels.name}
    return Result(bench="codec", summary=summary, rows=rows)
