"""What local steps do to the loss: a small GPT with AdamW, warm-up and clipping, on unshaped links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.harness import AA, Progress
from trimtab.bench.losses import final_losses
from trimtab.control.running_local_steps import local_steps_of
from trimtab.models import tasks

EVERY_STEP = ("ddp", "ddp" + AA, "trimtab")
"""Their losses do not depend on the link."""

CANARY = "local1bit (canary)"
LR, WARM_UP = 1e-3, 50
EVALUATIONS = 10
SMALL_GPT: dict[str, Any] = {
    "width": 64,
    "layers": 2,
    "heads": 4,
    "context": 48,
    "held_out": 256,
}


def trained(bits: int, every: int) -> str:
    """The name of local steps in so many bits, with rounds of so many steps."""
    return f"{bits} bits every {every}"


def loss_on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, list[list[float]]]:
    """The loss on held-out text at even distances, by method and seed.

    `spec["methods"]` exchange in every step. Local methods are named by bits and rounds (`trained`); the canary has the
    shortest of the rounds.
    """
    curves: dict[str, list[list[float]]] = {}
    every_seconds = max(1, spec["steps"] // EVALUATIONS)
    rounds = {trained(bits, every): (bits, every) for bits, every in spec["rounds"]}
    rounds[CANARY] = 1, min(every for _, every in spec["rounds"])

    def train(method: str, seed: int, data_seed: int) -> float:
        task = tasks.gpt(**SMALL_GPT, samples=spec["samples"], seed=seed)
        model: nn.Module = task.model
        if method in EVERY_STEP:
            model = DistributedDataParallel(model)
        else:
            bits, every = rounds[method]
            trimtab.local_steps(model, every=every, bits=bits, seed=seed)
        if method == "trimtab":
            trimtab.compress(model, trimtab.Adaptive(), seed=seed)  # type: ignore[arg-type]
        own = local_steps_of(model)
        if method == CANARY and own is not None and own.worker is not None:
            own.worker.without_feedback()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, betas=(0.9, 0.95))
        warm_up = min(WARM_UP / spec["steps"], 0.5)  # of a short run at most half
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, LR, total_steps=spec["steps"], pct_start=warm_up, cycle_momentum=False
        )
        curve = []
        for step in range(1, spec["steps"] + 1):
            model(*task.batch(step=step, rank=dist.get_rank(), seed=data_seed)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % every_seconds == 0:
                # After the last step as a script would, which saves the model then.
                with trimtab.agreed_weights(model, now=step == spec["steps"]):
                    model.eval()
                    inner = model.module if isinstance(model, DistributedDataParallel) else model
                    curve.append(task.held_out_loss(inner))
                    model.train()
        if own is not None:
            own.close()
        curves.setdefault(method, []).append(curve)
        return curve[-1]

    final_losses((*spec["methods"], *rounds), range(spec["seeds"]), train, report)
    return curves
