"""The rows of `trimtab bench tp` that need less memory.

Rows `vocab`: embedding and head on every rank, divided by vocabulary, and with activations divided along the sequence
as well; `torch` is `parallelize_module`, as its documentation advises, with embedding and head on every rank. Rows
`sequence`: activations between blocks on every rank, and divided along the sequence.

`memory_mb` is a rank's: parameters, optimizer states,
and what a step adds (GPU: its peak; CPU: gradients and what autograd keeps for the backward pass); `activations_mb` is
what a step adds without the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from trimtab.api.tensor_parallel import tensor_parallel
from trimtab.bench.harness import AA, Progress, interleave
from trimtab.bench.ranks import hosts, run_on_cluster
from trimtab.bench.scenarios.tp.by_torch import by_torch
from trimtab.bench.scenarios.tp.task import task
from trimtab.bench.trainer import KINDS, Trainer
from trimtab.models.tasks import Task

ENTRIES = 32768
"""Entries of the vocabulary; the text has bytes only."""

_VOCABULARY = {"vocabulary": ("tokens", "head")}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "vocab": {
        "replicated": {},
        "replicated" + AA: {},
        "divided": _VOCABULARY,
        "uneven": {**_VOCABULARY, "shares": (1, 2)},
        "and sequence": {**_VOCABULARY, "sequence": True},
    },
    "sequence": {
        "replicated": {},
        "replicated" + AA: {},
        "divided": {"sequence": True},
        "uneven": {"sequence": True, "shares": (1, 2)},
        "and vocab": {"sequence": True, **_VOCABULARY},
    },
}


def memory_rows(spec: Mapping[str, Any], what: str, progress: Progress) -> list[dict[str, Any]]:
    """The rows `vocab` or `sequence`, on two equal ranks."""
    more = {"what": what, "entries": ENTRIES if what == "vocab" else None}
    rows: list[dict[str, Any]] = run_on_cluster(
        hosts((1.0, 1.0), spec["device"]), on_rank, {**spec, **more}, progress
    )
    return rows


def memory_summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The figures of the rows `vocab`, or of the rows `sequence`."""
    what = rows[0]["method"].split()[0]
    by_method = {row["method"].removeprefix(f"{what} "): row for row in rows}
    whole, divided = by_method["replicated"], by_method["divided"]
    summary = {
        f"{what}_time": divided["over_replicated"],
        f"{what}_memory": divided["memory_mb"] / whole["memory_mb"],
        f"{what}_aa_ratio": by_method["replicated" + AA]["over_replicated"],
        f"{what}_loss_gap": abs(divided["loss"] - whole["loss"]),
    }
    if "torch" in by_method:
        both, torchs = by_method["and sequence"], by_method["torch"]
        summary["divided_memory_over_torch"] = both["memory_mb"] / torchs["memory_mb"]
        summary["divided_time_over_torch"] = both["over_torch"]
    if what == "sequence":
        summary["sequence_activations"] = divided["activations_mb"] / whole["activations_mb"]
    return summary


def on_rank(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
    """All methods, interleaved."""
    what = spec["what"]
    trainers: dict[str, Trainer] = {
        method: _trainer(spec, options) for method, options in OPTIONS[what].items()
    }
    if what == "vocab":
        trainers["torch"] = by_torch(_task(spec))
    steps = {method: trainer.step for method, trainer in trainers.items()}
    timings = interleave(steps, warmup=3, repeats=spec["repeats"], progress=report)
    return [
        {
            "method": f"{what} {method}",
            **timing.step,
            "over_replicated": timing.ratio(timings["replicated"]),
            "over_torch": timing.ratio(timings["torch"]) if "torch" in timings else None,
            "loss": trainers[method].loss,
            **_memory(trainers[method]),
        }
        for method, timing in timings.items()
    ]


def _task(spec: Mapping[str, Any]) -> Task:
    own = task(spec)
    model: Any = own.model
    if spec["entries"] is not None:
        torch.manual_seed(1)
        with own.device:
            model.tokens = nn.Embedding(spec["entries"], spec["width"])
            model.head = nn.Linear(spec["width"], spec["entries"], bias=False)
            nn.init.normal_(model.tokens.weight, std=0.02)
            nn.init.normal_(model.head.weight, std=0.02)
    return own


def _trainer(spec: Mapping[str, Any], options: Mapping[str, Any]) -> Trainer:
    own = _task(spec)
    mesh = init_device_mesh(own.device.type, (dist.get_world_size(),))
    tensor_parallel(own.model, mesh, kinds=KINDS, **options)
    optimizer = torch.optim.AdamW(own.model.parameters(), lr=3e-4)
    return Trainer(own.model, optimizer, lambda step: own.batch(step=step), own.device)


def _memory(trainer: Trainer) -> dict[str, float]:
    """Megabytes of one step; the most of all ranks."""
    parameters = [_local(parameter) for parameter in trainer.model.parameters()]
    states = [
        _local(v)
        for state in trainer.optimizer.state.values()
        for v in state.values()
        if isinstance(v, Tensor)
    ]
    own = sum(tensor.nbytes for tensor in [*parameters, *states])
    if trainer.device.type == "cuda":
        before = torch.cuda.memory_allocated(trainer.device)
        torch.cuda.reset_peak_memory_stats(trainer.device)
        trainer.step()
        added = torch.cuda.max_memory_allocated(trainer.device) - before
        added -= sum(_local(p).nbytes for p in trainer.model.parameters() if p.grad is not None)
    else:
        known = {p.untyped_storage().data_ptr() for p in parameters}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = _local(tensor).untyped_storage()
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            trainer.step()
        added = sum(kept.values())
    gradients = sum(parameter.nbytes for parameter in parameters)
    most = torch.tensor([own + gradients + added, added], dtype=torch.float64, device=trainer.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {"memory_mb": float(most[0]) / 1e6, "activations_mb": float(most[1]) / 1e6}


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of one of torch's own distributed tensors."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
