"""`trimtab bench local`: local steps over slow links, beside exchanging gradients in every step.

Speed: a GPT of 25 million parameters on emulated hosts. Each method trains for a block of steps, without a barrier in
between, over whole rounds, until its last exchange has arrived; blocks take turns. `ideal` is every worker by itself.
Loss: a small GPT with AdamW, warm-up and clipping, on unshaped links, with the rounds that were chosen on each link;
gaps are relative to DDP at equal samples. The canary, changes of weights in 1 bit without error feedback, must come
out as worse.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.harness import AA, Progress, Result, part
from trimtab.bench.losses import compare, final_losses
from trimtab.bench.ranks import hosts, run_on_cluster, wire_bytes
from trimtab.bench.trainer import Trainer
from trimtab.control.local_steps import LocalSteps, local_steps_of
from trimtab.control.rank_values import gather_numbers
from trimtab.measure.timing import meet, synchronize
from trimtab.models import tasks

SPEED = ("ddp", "ddp" + AA, "trimtab", "local", "local2bit", "ideal")
CANARY = "local1bit (canary)"
LOSS = ("ddp", "ddp" + AA, "trimtab", "local", "local2bit", CANARY)
LR, WARM_UP = 1e-3, 50
FULL = ("100mbit", "10mbit"), (2, 4)
DDP_STEPS = 2
"""Steps of a method that exchanges gradients in every step, in each block."""


def local(
    links: Sequence[str],
    workers: Sequence[int],
    full: bool,
    repeats: int,
    steps: int,
    seeds: int,
    progress: Progress,
) -> Result:
    """Every link with every number of workers: step times, then losses with the rounds that were chosen."""
    if full:
        links, workers = FULL
    jobs = [(link, count) for link in links for count in workers]
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for index, (link, count) in enumerate(jobs):
        speeds = (1.0,) * count
        timed = run_on_cluster(
            hosts(speeds, link=link), on_rank, {"repeats": repeats}, part(progress, 2 * index, 2 * len(jobs))
        )
        spec = {"steps": steps, "seeds": seeds, "every": timed["every"]}
        finals = run_on_cluster(
            hosts(speeds), loss_on_rank, spec, part(progress, 2 * index + 1, 2 * len(jobs))
        )
        losses = {row["method"]: row for row in compare(finals)}
        base = losses["ddp"]["final_loss"]
        of_job = {row["method"]: row for row in timed["rows"]}
        for method in dict.fromkeys((*SPEED, *LOSS)):
            judged = losses.get(method)
            rows.append(
                {
                    "link": link,
                    "workers": count,
                    "speeds": "/".join(f"{speed:g}" for speed in speeds),
                    "method": method,
                    **of_job.get(method, {}),
                    "loss_at_equal_samples": judged and judged["final_loss"],
                    "gap": judged and judged["gap"] / base,
                    "worse": judged and judged["worse"],
                }
            )
        name = f"{link} x{count}"
        summary |= {
            f"{name} every": timed["every"],
            f"{name} local_over_ddp": of_job["local"]["over_ddp"],
            f"{name} local_fraction_of_ideal": of_job["local"]["fraction_of_ideal"],
            f"{name} local_gap": losses["local"]["gap"] / base,
            f"{name} aa_gap": losses["ddp" + AA]["gap"] / base,
            f"{name} canary_flagged": losses[CANARY]["worse"],
            f"{name} explain": timed["explain"],
        }
    return Result(bench="local", summary=summary, rows=rows)


class Method(Trainer):
    """One method's model, with its rounds where it has any."""

    def __init__(self, method: str, task: tasks.Task) -> None:
        self.name = method
        kind = method.removesuffix(AA)
        model: nn.Module = task.model
        if kind in ("ddp", "trimtab"):
            model = DistributedDataParallel(model)
        if kind == "trimtab":
            trimtab.compress(model)  # type: ignore[arg-type]
        elif kind == "local":
            trimtab.local_steps(model)
        elif kind == "local2bit":
            trimtab.local_steps(model, bits=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        super().__init__(model, optimizer, lambda step: task.batch(step=step, rank=dist.get_rank()))
        self.samples = task.samples
        self.rates: list[float] = []
        self.wire: list[float] = []

    @property
    def local_steps(self) -> LocalSteps | None:
        return local_steps_of(self.model)

    def settle(self) -> None:
        """Train until local steps have chosen their settings and one round is over."""
        steps = 0
        while self.local_steps is not None and self.local_steps.worker is None:
            self._train(1, steps)
            steps += 1
        own = self.local_steps
        if own is not None and own.worker is not None:
            self._train(own.worker.settings.every, steps)
        else:
            self._train(1, steps)
        self._drain()

    def block(self, step_s: float) -> float:
        """Train for a block of steps; returns the seconds of one."""
        own = self.local_steps
        steps = DDP_STEPS
        if own is not None and own.worker is not None:
            every = own.worker.settings.every
            steps = every * max(1, ceil(12 / every))  # some seconds, whole rounds
        elif self.name == "ideal":
            steps = max(4, min(24, round(4.0 / step_s)))
        meet(self.device)
        sent, start = wire_bytes(), time.perf_counter()
        self._train(steps, 0)
        self._drain()
        meet(self.device)
        seconds = (time.perf_counter() - start) / steps
        self.wire.append((wire_bytes() - sent) / 1e6 / steps)
        self.rates.append(self.samples * dist.get_world_size() / seconds)
        return seconds

    def _train(self, steps: int, first: int) -> None:
        for step in range(first, first + steps):
            self.train(self.batch(step))

    def _drain(self) -> None:
        own = self.local_steps
        if own is not None:
            own.finish_step()
            if own.worker is not None:
                for fragment in own.worker.fragments:
                    fragment.wait()
        synchronize(self.device)


def on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, Any]:
    """Samples a second of every method."""
    methods = {
        name: Method(name, tasks.gpt(width=512, layers=8, heads=8, context=128, samples=1)) for name in SPEED
    }
    for name in reversed(SPEED):
        methods[name].settle()
    step_s = 0.3
    for round_ in range(spec["repeats"]):
        for name in reversed(SPEED):
            seconds = methods[name].block(step_s)
            if name == "ideal":
                step_s = max(row[0] for row in gather_numbers([seconds], None))
        report(round_ + 1, spec["repeats"])
    rates = {name: median(method.rates) for name, method in methods.items()}
    chosen = methods["local"].local_steps
    assert chosen is not None
    assert chosen.worker is not None
    return {
        "rows": [
            {
                "method": name,
                "samples_per_s": rates[name],
                "over_ddp": rates[name] / rates["ddp"],
                "fraction_of_ideal": rates[name] / rates["ideal"],
                "wire_mb_per_step": median(methods[name].wire),
            }
            for name in SPEED
        ],
        "every": chosen.worker.settings.every,
        "explain": trimtab.explain(methods["local"].model),
    }


def loss_on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, list[float]]:
    """The loss on held-out text after the same number of samples, by method and seed."""

    def train(method: str, seed: int, data_seed: int) -> float:
        task = tasks.gpt(width=96, layers=2, heads=4, context=64, samples=32, held_out=256, seed=seed)
        kind = method.removesuffix(AA)
        model: nn.Module = task.model
        if kind in ("ddp", "trimtab"):
            model = DistributedDataParallel(model)
        if kind == "trimtab":
            trimtab.compress(model, trimtab.Adaptive(), seed=seed)  # type: ignore[arg-type]
        elif kind.startswith("local"):
            bits = {"local": 4, "local2bit": 2, CANARY: 1}[kind]
            trimtab.local_steps(model, every=spec["every"], bits=bits, seed=seed)
        own = local_steps_of(model)
        if method == CANARY and own is not None and own.worker is not None:
            own.worker.without_feedback()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, betas=(0.9, 0.95))
        warm_up = min(WARM_UP / spec["steps"], 0.5)  # of a short run at most half
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, LR, total_steps=spec["steps"], pct_start=warm_up, cycle_momentum=False
        )
        for step in range(spec["steps"]):
            model(*task.batch(step=step, rank=dist.get_rank(), seed=data_seed)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        with trimtab.agreed_weights(model):
            model.eval()
            final = task.held_out_loss(model.module if isinstance(model, DistributedDataParallel) else model)
        if own is not None:
            own.close()
        return final

    return final_losses(LOSS, range(spec["seeds"]), train, report)
