"""`trimtab bench loss`: what fewer bits do to the loss, and proof that the comparison can see damage.

Only how the gradients travel differs between the methods (`bench.losses` says how they are compared). The optimizer
is SGD without clipping: Adam and clipping both hide the size of a gradient, and with it much of what a codec does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.harness import AA, Progress, Result
from trimtab.bench.losses import compare, final_losses, fit
from trimtab.bench.ranks import run_on_cluster, two_hosts
from trimtab.bench.trainer import Trainer
from trimtab.codec import Block
from trimtab.models import tasks

CANARY = "1-nearest (canary)"
METHODS: dict[str, dict[str, Any] | None] = {
    "fp32": None,
    "fp32" + AA: None,
    "8": {"codec": Block(bits=8)},
    "4": {"codec": Block(bits=4)},
    "4-nearest": {"codec": Block(bits=4, stochastic=False)},
    "2": {"codec": Block(bits=2)},
    "2-feedback": {"codec": Block(bits=2), "error_feedback": True},
    CANARY: {"codec": Block(bits=1, stochastic=False)},
}


def loss(steps: int, seeds: int, progress: Progress) -> Result:
    """Train every method with every seed on two ranks; compare the losses on held-out text."""
    finals = run_on_cluster(two_hosts(), on_rank, {"steps": steps, "seeds": seeds}, progress)
    rows = compare(finals)
    by_method = {row["method"]: row for row in rows}
    summary: dict[str, Any] = {
        "canary_flagged": by_method[CANARY]["worse"],
        "4_bits_worse": by_method["4"]["worse"],
        "4_bits_gap": by_method["4"]["gap"],
        "aa_gap": by_method["fp32" + AA]["gap"],
    }
    return Result(bench="loss", summary=summary, rows=rows)


def on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, list[float]]:
    """The loss on held-out text after the last step, by method and seed."""

    def train(method: str, seed: int, data_seed: int) -> float:
        task = small_gpt(seed)
        ddp = DistributedDataParallel(task.model)
        if (settings := METHODS[method]) is not None:
            trimtab.compress(ddp, seed=seed, **settings)
        return fit(sgd_trainer(ddp, task, data_seed), task, spec["steps"])

    return final_losses(METHODS, range(spec["seeds"]), train, report)


def small_gpt(seed: int) -> tasks.Task:
    """The model that losses are compared on."""
    return tasks.gpt(width=96, layers=2, heads=4, context=64, samples=8, held_out=256, seed=seed)


def sgd_trainer(model: nn.Module, task: tasks.Task, data_seed: int) -> Trainer:
    """Trains a wrapped model with SGD on batches that differ from rank to rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Trainer(model, optimizer, lambda step: task.batch(step=step, rank=dist.get_rank(), seed=data_seed))
