"""What the ranks of `test_long_run` do: train with the default, and look at what the process holds."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.scenarios.chaos.training import digest
from trimtab.control.compression.ddp import adaptive_of


def held() -> dict[str, int]:
    """Memory in MB, and the numbers of threads, file descriptors and process groups."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """Each rank's first and last look, and a hash of its parameters."""
    torch.manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(96, 96) for _ in range(2))))
    trimtab.compress(ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    looks = []
    for step in range(spec["steps"]):
        optimizer.zero_grad()
        ddp(torch.randn(8, 96)).square().mean().backward()
        optimizer.step()
        if step + 1 in (spec["steps"] // 3, spec["steps"]):
            looks.append(held())
        if step % 100 == 0:
            report(step, spec["steps"])
    controller = adaptive_of(ddp)
    own = {
        "looks": looks,
        "digest": digest(dict(ddp.module.named_parameters())),
        "changes": 0 if controller is None else len(controller.history),
        "explained": trimtab.explain(ddp),
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every
