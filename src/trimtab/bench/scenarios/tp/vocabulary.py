"""The rows `vocab` of `trimtab bench tp`: embedding and head on every rank, and divided by vocabulary.

`memory_mb` is a rank's: parameters, optimizer states, and what a step adds (GPU: its peak; CPU: gradients and what
autograd keeps for the backward pass).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh

from trimtab.api.tensor_parallel import tensor_parallel
from trimtab.bench.harness import AA, Progress, interleave
from trimtab.bench.ranks import hosts, run_on_cluster
from trimtab.bench.scenarios.tp.task import task
from trimtab.bench.trainer import KINDS, Trainer

ENTRIES = 32768
"""Entries of the vocabulary; the text has bytes only."""

OPTIONS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "replicated" + AA: {},
    "divided": {"vocabulary": ("tokens", "head")},
    "uneven": {"vocabulary": ("tokens", "head"), "shares": (1, 2)},
}


def vocabulary_rows(spec: Mapping[str, Any], progress: Progress) -> list[dict[str, Any]]:
    """The rows, on two equal ranks."""
    rows: list[dict[str, Any]] = run_on_cluster(
        hosts((1.0, 1.0), spec["device"]), on_rank, {**spec, "entries": ENTRIES}, progress
    )
    return rows


def vocabulary_summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    by_method = {row["method"].removeprefix("vocab "): row for row in rows}
    whole, divided = by_method["replicated"], by_method["divided"]
    return {
        "vocab_time": divided["over_replicated"],
        "vocab_memory": divided["memory_mb"] / whole["memory_mb"],
        "vocab_aa_ratio": by_method["replicated" + AA]["over_replicated"],
        "vocab_loss_gap": abs(divided["loss"] - whole["loss"]),
    }


def on_rank(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
    """All methods, interleaved."""
    trainers = {method: _trainer(spec, method) for method in OPTIONS}
    steps = {method: trainer.step for method, trainer in trainers.items()}
    timings = interleave(steps, warmup=3, repeats=spec["repeats"], progress=report)
    return [
        {
            "method": f"vocab {method}",
            **timing.step,
            "over_replicated": timing.ratio(timings["replicated"]),
            "memory_mb": _memory(trainers[method]) / 1e6,
            "loss": trainers[method].losses[spec["repeats"] + 2],
        }
        for method, timing in timings.items()
    ]


def _trainer(spec: Mapping[str, Any], method: str) -> Trainer:
    own = task(spec)
    model: Any = own.model
    torch.manual_seed(1)
    with own.device:
        model.tokens = nn.Embedding(spec["entries"], spec["width"])
        model.head = nn.Linear(spec["width"], spec["entries"], bias=False)
        nn.init.normal_(model.tokens.weight, std=0.02)
        nn.init.normal_(model.head.weight, std=0.02)
    mesh = init_device_mesh(own.device.type, (dist.get_world_size(),))
    tensor_parallel(model, mesh, kinds=KINDS, **OPTIONS[method])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Trainer(model, optimizer, lambda step: own.batch(step=step), own.device)


def _memory(trainer: Trainer) -> float:
    """Bytes of one step; the most of all ranks."""
    parameters = list(trainer.model.parameters())
    states = [
        v for state in trainer.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)
    ]
    own = sum(tensor.nbytes for tensor in [*parameters, *states])
    if trainer.device.type == "cuda":
        before = torch.cuda.memory_allocated(trainer.device)
        torch.cuda.reset_peak_memory_stats(trainer.device)
        trainer.step()
        added = torch.cuda.max_memory_allocated(trainer.device) - before
    else:
        known = {p.untyped_storage().data_ptr() for p in parameters}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            trainer.step()
        added = sum(kept.values()) + sum(parameter.nbytes for parameter in parameters)
    most = torch.tensor(float(own + added), device=trainer.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)
