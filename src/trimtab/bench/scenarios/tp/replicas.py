"""The rows `2d` of `trimtab bench tp`: two tensor groups of two ranks, data parallel between them, one rank slow.

`even` has equal shares; `shares` those measured in each group, so that the replicas divide their units differently;
`auto` finds out while it runs; `4 bits` is `shares` with compressed gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from trimtab.api.compress import compress
from trimtab.api.tensor_parallel import tensor_parallel
from trimtab.bench.harness import AA, Progress, interleave
from trimtab.bench.ranks import hosts, run_on_cluster
from trimtab.bench.scenarios.tp.task import task
from trimtab.bench.trainer import KINDS, Trainer
from trimtab.codec import Block
from trimtab.models.tasks import Task
from trimtab.sharding.unit_block import sharded_model

OPTIONS: dict[str, dict[str, Any]] = {
    "even": {},
    "even" + AA: {},
    "shares": {"shares": "measured"},
    "auto": {"balance": "auto"},
    "4 bits": {"shares": "measured"},
}
_UNTIL_BALANCED = 26
"""Steps after which `auto` has moved its units: two windows and a step, and the step that reads them."""


def replica_rows(spec: Mapping[str, Any], progress: Progress) -> list[dict[str, Any]]:
    """The rows, with the second rank of the first group at the speed of `spec`."""
    cluster = hosts((1.0, spec["speed"], 1.0, 1.0), spec["device"])
    rows: list[dict[str, Any]] = run_on_cluster(cluster, on_rank, spec, progress, throttle="gemm")
    return rows


def on_rank(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
    """All methods, interleaved. The loss is the mean over the replicas."""
    trainers = {method: _trainer(task(spec), method) for method in OPTIONS}
    for _ in range(spec.get("settle", _UNTIL_BALANCED)):
        trainers["auto"].step()
    settled = len(trainers["auto"].losses)
    for method, trainer in trainers.items():
        while method != "auto" and len(trainer.losses) < settled:  # so that all have taken the same steps
            trainer.step()
    timings = interleave(
        {method: trainer.step for method, trainer in trainers.items()},
        warmup=3,
        repeats=spec["repeats"],
        progress=report,
    )
    return [
        {
            "method": f"2d {method}",
            "speed": spec["speed"],
            **timing.step,
            "over_even": timing.ratio(timings["even"]),
            "units": _units(trainers[method].module),
            "loss": _mean(trainers[method].loss, trainers[method].device),
        }
        for method, timing in timings.items()
    ]


def replica_summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    by_method = {row["method"].removeprefix("2d "): row for row in rows}
    exact = [by_method[method]["loss"] for method in ("even", "shares", "auto")]
    return {
        "2d_shares_speedup": 1 / by_method["shares"]["over_even"],
        "2d_auto_speedup": 1 / by_method["auto"]["over_even"],
        "2d_aa_ratio": by_method["even" + AA]["over_even"],
        "2d_loss_gap": max(exact) - min(exact),
    }


def _trainer(own: Task, method: str) -> Trainer:
    mesh = init_device_mesh(own.device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    replica = mesh.get_local_rank("dp")
    model: nn.Module = tensor_parallel(own.model, mesh, kinds=KINDS, **OPTIONS[method])
    model = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    if method == "4 bits":
        compress(model, Block(bits=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Trainer(model, optimizer, lambda step: own.batch(step=2 * step + replica), own.device)


def _units(model: nn.Module) -> list[dict[str, list[int]]]:
    """The units of each rank in the first two blocks of each replica."""
    blocks = list(sharded_model(model, "bench").blocks.values())[:2]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, {block.name: list(block.table.counts) for block in blocks})
    return [every[0], every[-1]]


def _mean(loss: float, device: torch.device) -> float:
    total = torch.tensor(loss, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
