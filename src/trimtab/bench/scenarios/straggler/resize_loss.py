"""What leaving units out on one of two ranks does to the loss: priority compared with random, seed by seed.

Only what the second rank leaves out differs between the methods (`bench.losses` says how they are compared). The
canary leaves out most of both ranks at random, which must show.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from statistics import mean, stdev
from typing import Any

import torch
import torch.distributed as dist

from trimtab.bench.harness import AA, Progress
from trimtab.bench.losses import compare, final_losses, fit
from trimtab.bench.ranks import run_on_cluster, two_hosts
from trimtab.bench.trainer import TensorTrainer
from trimtab.control.tensor.resizing import WINDOW, set_resize, watch_resize
from trimtab.models import tasks

RATIO = 0.5
STEPS = 400
"""Enough to show a difference: after 300, that between priority and random was only twice its standard error."""

CANARY = "resize-random 0.9 on both (canary)"
METHODS: dict[str, dict[str, Any] | None] = {
    "even": None,
    "even" + AA: None,
    "resize-random": {"ratio": RATIO, "selection": "random"},
    "resize-priority": {"ratio": RATIO, "selection": "priority"},
    CANARY: {"ratio": 0.9, "selection": "random"},
}
BEGINS = 2 * WINDOW
"""The step from which units are left out: a rank becomes slow while a job runs, when there are statistics."""

FIRST_SEED = 10
"""Not the seeds that the bench's sizes and steps were chosen with."""


def resize_loss(steps: int, seeds: int, progress: Progress) -> list[dict[str, Any]]:
    """Rows of every method's loss on held-out text after training with each seed, on two ranks.

    Keys: those of `trimtab bench loss`, and the seeds' losses as `losses`. Another row, `priority over random`,
    has the mean difference of the two (below 0: priority is better), its spread, and in how many seeds it was better.
    """
    return rows_of(run_on_cluster(two_hosts(), on_rank, {"steps": steps, "seeds": seeds}, progress))


def rows_of(finals: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    rows = [{**row, "losses": finals[row["method"]]} for row in compare(finals)]
    differences = [p - r for p, r in zip(finals["resize-priority"], finals["resize-random"], strict=True)]
    between = {
        "method": "priority over random",
        "gap": mean(differences),
        "spread": stdev(differences),
        "gap_over_noise": mean(differences) / (stdev(differences) / sqrt(len(differences))),
        "better_seeds": sum(each < 0 for each in differences),
    }
    return [*rows, between]


def on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, list[float]]:
    """The loss on held-out text after the last step, by method and seed."""

    def train(method: str, seed: int, data_seed: int) -> float:
        setting = METHODS[method]
        task = tasks.gpt(width=64, layers=2, heads=4, context=32, samples=16, held_out=256, seed=seed)
        trainer = TensorTrainer(
            task,
            prepare=watch_resize if setting is not None else lambda model: None,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1),
        )
        trainer.batch = lambda step: task.batch(step=step, seed=data_seed)

        def after_step(step: int, loss: torch.Tensor) -> None:
            slow = dist.get_rank() == 1 or method == CANARY
            if setting is not None and step == BEGINS - 1 and slow:
                set_resize(trainer.model, seed=seed, **setting)

        return fit(trainer, task, spec["steps"], after_step)

    seeds = range(FIRST_SEED, FIRST_SEED + spec["seeds"])
    return final_losses(METHODS, seeds, train, report)
