"""`python -m tests.gpu.bucket_sweep gpt2|vit`: a step in buckets of several sizes, beside the size that is chosen."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab._compat import rebuild_reducer
from trimtab.bench.harness import Progress, interleave
from trimtab.bench.ranks import run_on_cluster, slices
from trimtab.bench.scenarios.ddp import Method, NoCodec, make_task
from trimtab.bench.trainer import Trainer
from trimtab.codec import Block
from trimtab.control.compression.ddp import compress_ddp
from trimtab.doors.ddp import DdpCompression
from trimtab.measure.host_links import measure_buckets

SIZES_MB = (2.5, 5, 12.5, 25, 50, 100)
CODEC = Block(bits=3, block=128)


class Sized(Trainer):
    """The model in buckets of one size, 3 bits; or those bytes without a codec."""

    def __init__(self, model: str, device: torch.device, cap_mb: float, *, codec: bool = True) -> None:
        task = make_task(model, device)
        ddp = DistributedDataParallel(task.model)
        rebuild_reducer(ddp, int(cap_mb * (1 << 20)))
        if codec:
            compress_ddp(ddp, CODEC, keep_buckets=True)
        else:
            ddp.register_comm_hook(None, DdpCompression(ddp, CODEC, kernels=NoCodec()).reduce)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-4)
        super().__init__(
            ddp, optimizer, lambda step: task.batch(step=step, rank=dist.get_rank()), device, half=True
        )


def on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, Any]:
    device, model = torch.device("cuda"), spec["model"]
    default = Method("trimtab", model, device)
    default.settle()
    trainers: dict[str, Trainer] = {
        "ideal": Method("ideal", model, device),
        "chosen": default,
        "payload4": Method("payload4", model, device),
    }
    trainers |= {f"{size:g} MiB": Sized(model, device, size) for size in SIZES_MB}
    trainers |= {f"{size:g} MiB, no codec": Sized(model, device, size, codec=False) for size in (5, 25)}
    cases = {name: trainer.step for name, trainer in trainers.items()}
    timings = interleave(cases, warmup=4, repeats=spec["repeats"], progress=report)
    assert isinstance(default.model, DistributedDataParallel)
    compression = DdpCompression(default.model, CODEC)
    assert dist.group.WORLD is not None
    bucket = measure_buckets(compression.trial_reduction, dist.group.WORLD, device)
    return {
        "model": model,
        "of_ideal": {name: 1 / timing.ratio(timings["ideal"]) for name, timing in timings.items()},
        "step_ms": {name: timing.step["step_ms"] for name, timing in timings.items()},
        "bucket_ms": bucket.per_message_s * 1e3,
        "ms_per_mib": bucket.per_byte_s * (1 << 20) * 1e3,
        "explain": trimtab.explain(default.model),
    }


def main() -> None:
    spec = {"model": sys.argv[1], "device": "cuda", "repeats": 12}
    from tests.gpu import (
        bucket_sweep,
    )  # ranks import the function by its module's name, which is __main__ here

    print(json.dumps(run_on_cluster(slices(4), bucket_sweep.on_rank, spec)))


if __name__ == "__main__":
    main()
