"""Trains every method with every seed, and judges the losses.

Every method trains the same model from the same start on the same data. Differences to the first method, the
baseline, are taken seed by seed. The second method is the A/A row: the baseline with other draws of the data,
which shows how far apart chance brings equal methods. A canary, a setting known to be harmful, must come out as worse:
otherwise the comparison could not see damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite, sqrt
from statistics import mean, stdev
from typing import Any

import torch

from trimtab.bench.harness import AA, Progress
from trimtab.bench.trainer import Trainer
from trimtab.models.tasks import Task

DIVERGED = 100.0
"""Stands for a loss that is no longer a number, so that it can be averaged and counts as worse."""

SIGMAS = 3.0
"""A mean gap of more than this many times the noise counts as worse."""


def final_losses(
    methods: Iterable[str], seeds: Sequence[int], train: Callable[[str, int, int], float], report: Progress
) -> dict[str, list[float]]:
    """By method: the loss on held-out data after training with each seed.

    Args:
        train: one run by (method, seed, seed of the data), which differs from the seed in the A/A row.
    """
    runs = [(method, seed) for seed in seeds for method in methods]
    finals: dict[str, list[float]] = {method: [] for method, _ in runs}
    for done, (method, seed) in enumerate(runs):
        final = train(method, seed, seed + 1000 if method.endswith(AA) else seed)
        finals[method].append(final if isfinite(final) else DIVERGED)
        report(done + 1, len(runs))
    return finals


def fit(
    trainer: Trainer,
    task: Task,
    steps: int,
    after_step: Callable[[int, torch.Tensor], None] = lambda step, loss: None,
) -> float:
    """Train with a one-cycle learning rate up to the optimizer's own; returns the loss on held-out data."""
    optimizer = trainer.optimizer
    lr = optimizer.param_groups[0]["lr"]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, cycle_momentum=False)
    for step in range(steps):
        loss = trainer.train(trainer.batch(step))
        schedule.step()
        after_step(step, loss)
    trainer.model.eval()
    return task.held_out_loss(trainer.module)


def compare(finals: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """A row for each method with its gap to the baseline; the first method is the baseline, the second its A/A row.

    Noise is the standard error of the baseline's mean over seeds, or of the A/A row's gap if that is larger.
    A method's own scatter does not count: one that now and then diverges must not pass because of it.
    """
    base, again = list(finals.values())[:2]
    noise = max(_standard_error(base), _standard_error([b - a for a, b in zip(base, again, strict=True)]))
    rows = []
    for method, losses in finals.items():
        gap = mean(loss - reference for loss, reference in zip(losses, base, strict=True))
        rows.append(
            {
                "method": method,
                "final_loss": mean(losses),
                "spread": stdev(losses),
                "gap": gap,
                "gap_over_noise": gap / noise,
                "worse": gap > SIGMAS * noise,
            }
        )
    return rows


def judged(finals: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """The rows of `compare`, by method."""
    return {row["method"]: row for row in compare(finals)}


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / sqrt(len(values))
