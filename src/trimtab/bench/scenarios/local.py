"""`trimtab bench local`: local steps over slow links, beside exchanging gradients in every step.

Speed: a GPT of 25 million parameters on emulated hosts. Each method trains for a block of steps, without a barrier in
between, over whole rounds, until its last exchange has arrived; blocks take turns. `ideal` is every worker by itself.
A job of its own has hosts of unequal speed, whose batches a loader shares out.

Loss: a small GPT with AdamW, warm-up and clipping, on unshaped links, with the rounds that were chosen on each link;
gaps are relative to DDP at equal samples. The canary, changes of weights in 1 bit without error feedback, must come
out as worse. `time_to_loss_s` joins the two: the steps that the small GPT needs to a loss 3 % above DDP's last one,
at the seconds of the 25 M GPT's steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import ceil
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.harness import AA, Progress, Result, part
from trimtab.bench.losses import final_losses, judged
from trimtab.bench.ranks import hosts, run_on_cluster, wire_bytes
from trimtab.bench.trainer import LoaderTrainer, Trainer, take_turns
from trimtab.control.local_steps import LocalSteps, local_steps_of
from trimtab.control.rank_values import gather_numbers
from trimtab.measure.timing import meet, synchronize
from trimtab.models import tasks

SPEED = ("ddp", "ddp" + AA, "trimtab", "local", "local2bit", "ideal")
EVERY_STEP = ("ddp", "ddp" + AA, "trimtab")
"""Their losses do not depend on the link."""

CANARY = "local1bit (canary)"
LOCAL_BITS = {"local": 4, "local2bit": 2, CANARY: 1}
UNEVEN, BATCH, ROUND, FEW = (1.0, 0.4), 14, 16, 2
"""Speeds of unequal hosts, their global batch and round, and how many steps of plain DDP are enough."""

LR, WARM_UP = 1e-3, 50
FULL = ("100mbit", "10mbit"), (2, 4)
PARTS = ("speed", "uneven", "loss")
LONG_S = 30.0
"""A method whose step takes longer has one step in all: at 10 Mbit/s one of plain DDP takes a minute and a half."""

EVALUATIONS = 10
NEAR = 1.03
"""`time_to_loss_s` is the time to this many times DDP's last loss."""

GPT = {"width": 512, "layers": 8, "heads": 8, "context": 128}
SMALL_GPT: dict[str, Any] = {
    "width": 64,
    "layers": 2,
    "heads": 4,
    "context": 64,
    "samples": 16,
    "held_out": 256,
}


def local(
    links: Sequence[str],
    workers: Sequence[int],
    full: bool,
    only: Sequence[str],
    repeats: int,
    steps: int,
    seeds: int,
    progress: Progress,
    model: Mapping[str, int] | None = None,
) -> Result:
    """Every link with every number of workers: step times, then losses with the rounds that were chosen."""
    if full:
        links, workers = FULL
    chosen = only or PARTS
    timed = [(link, count) for link in links for count in workers] if "speed" in chosen else []
    uneven = "uneven" in chosen
    of_losses = list(workers) if "loss" in chosen else []
    jobs = len(timed) + uneven + len(of_losses)
    spec = {"repeats": repeats, "model": model or GPT}
    speeds: dict[tuple[str, int], dict[str, Any]] = {}
    for link, count in timed:
        cluster = hosts((1.0,) * count, link=link)
        speeds[link, count] = run_on_cluster(cluster, on_rank, spec, part(progress, len(speeds), jobs))
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    if uneven:
        of_uneven = run_on_cluster(
            hosts(UNEVEN, link=links[0]), uneven_on_rank, spec, part(progress, len(timed), jobs)
        )
        names = {"link": links[0], "workers": len(UNEVEN), "speeds": "/".join(f"{each:g}" for each in UNEVEN)}
        rows += [{**names, **row} for row in of_uneven]
        by_method = {row["method"]: row for row in of_uneven}
        summary["uneven local_fraction_of_ideal"] = by_method["local"]["fraction_of_ideal"]
    for index, count in enumerate(of_losses):
        every = {link: speeds.get((link, count), {"every": 16})["every"] for link in links}
        spec = {"steps": steps, "seeds": seeds, "every": sorted(set(every.values()))}
        curves = run_on_cluster(
            hosts((1.0,) * count), loss_on_rank, spec, part(progress, len(timed) + uneven + index, jobs)
        )
        for link in links:
            own = of_link(curves, every[link])
            more, figures = joined(link, count, speeds.get((link, count)), own, steps)
            rows, summary = rows + more, summary | figures
    if not of_losses:
        for (link, count), speed in speeds.items():
            more, figures = joined(link, count, speed, None, steps)
            rows, summary = rows + more, summary | figures
    return Result(bench="local", summary=summary, rows=rows)


def of_link(curves: Mapping[str, Any], every: int) -> dict[str, list[list[float]]]:
    """The curves of the methods on a link, whose rounds have so many steps."""
    return {
        **{method: curves[method] for method in EVERY_STEP},
        **{method: curves[f"{method} {every}"] for method in LOCAL_BITS},
    }


def joined(
    link: str,
    count: int,
    speed: Mapping[str, Any] | None,
    curves: Mapping[str, list[list[float]]] | None,
    steps: int,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and figures of a link, from what was timed and what was trained there, as far as either was."""
    timed = {} if speed is None else {row["method"]: row for row in speed["rows"]}
    losses = (
        {} if curves is None else judged({name: [each[-1] for each in own] for name, own in curves.items()})
    )
    base = losses["ddp"]["final_loss"] if losses else None
    rows = []
    for method in dict.fromkeys((*timed, *losses)):
        row: dict[str, Any] = {
            "link": link,
            "workers": count,
            "speeds": "/".join(["1"] * count),
            "method": method,
        }
        row |= timed.get(method, {})
        if base is not None and curves is not None and method in losses:
            needed = steps_to(NEAR * base, [mean(each) for each in zip(*curves[method], strict=True)], steps)
            # The canary travels no slower than 2 bits.
            step_s = timed.get("local2bit" if method == CANARY else method, {}).get("step_s")
            row |= {
                "loss_at_equal_samples": losses[method]["final_loss"],
                "gap": losses[method]["gap"] / base,
                "worse": losses[method]["worse"],
                "time_to_loss_s": None if needed is None or step_s is None else needed * step_s,
            }
        rows.append(row)
    name = f"{link} x{count}"
    figures: dict[str, Any] = {}
    if speed is not None:
        figures |= {
            f"{name} every": speed["every"],
            f"{name} local_over_ddp": timed["local"]["over_ddp"],
            f"{name} local_fraction_of_ideal": timed["local"]["fraction_of_ideal"],
            f"{name} explain": speed["explain"],
        }
    if losses:
        figures |= {
            f"{name} local_gap": losses["local"]["gap"] / base,
            f"{name} aa_gap": losses["ddp" + AA]["gap"] / base,
            f"{name} canary_flagged": losses[CANARY]["worse"],
            f"{name} loss_steps": steps,
        }
    return rows, figures


def steps_to(loss: float, curve: Sequence[float], steps: int) -> float | None:
    """The steps after which a curve of evenly spaced losses first is at or below a loss; None if it never is."""
    for index, value in enumerate(curve):
        if value <= loss:
            before = curve[index - 1] if index else value
            passed = 1.0 if before <= value else (before - loss) / (before - value)
            return (index + passed) * steps / len(curve)
    return None


class Method(Trainer):
    """One method's model, with its rounds where it has any."""

    def __init__(self, method: str, task: tasks.Task) -> None:
        self.name = method
        kind = method.removesuffix(AA)
        model: nn.Module = task.model
        if kind in ("ddp", "trimtab"):
            # Every rank has the same weights; at 10 Mbit/s sending them would take a minute and a half.
            model = DistributedDataParallel(model, init_sync=False)
        if kind == "trimtab":
            trimtab.compress(model)  # type: ignore[arg-type]
        elif kind == "local":
            trimtab.local_steps(model)
        elif kind == "local2bit":
            trimtab.local_steps(model, bits=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        super().__init__(model, optimizer, lambda step: task.batch(step=step, rank=dist.get_rank()))
        self.samples = task.samples
        self.seconds_of_steps: list[float] = []
        self.wire: list[float] = []

    @property
    def local_steps(self) -> LocalSteps | None:
        return local_steps_of(self.model)

    def settle(self) -> None:
        """Train until local steps have chosen their settings and two fragments have been exchanged."""
        own = self.local_steps
        if own is None:
            return
        steps = 0
        while own.worker is None:
            self._train(1, steps)
            steps += 1
        self._train(2 * own.worker.settings.delay, steps)
        self._drain()

    def block(self, step_s: float) -> float:
        """Train for a block of steps; returns the seconds of one."""
        if self.seconds_of_steps and self.seconds_of_steps[-1] > LONG_S:
            return self.seconds_of_steps[-1]
        own, steps = self.local_steps, 2
        if own is not None and own.worker is not None:
            every = own.worker.settings.every
            steps = every * max(1, ceil(12 / every))  # some seconds, whole rounds
        elif self.name == "ideal":
            steps = max(4, min(24, round(4.0 / step_s)))
        elif not self.seconds_of_steps:
            steps = 1  # how long it takes is not known yet
        meet(self.device)
        sent, start = wire_bytes(), time.perf_counter()
        self._train(steps, 0)
        self._drain()
        meet(self.device)
        seconds = (time.perf_counter() - start) / steps
        self.wire.append((wire_bytes() - sent) / 1e6 / steps)
        self.seconds_of_steps.append(seconds)
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
    """Seconds of a step of every method. The second look at a method is at the same model."""
    kinds = [name for name in SPEED if not name.endswith(AA)]
    methods = {name: Method(name, tasks.gpt(**spec["model"], samples=1)) for name in kinds}
    again: list[float] = []
    rounds = len(kinds) + spec["repeats"]
    for done, method in enumerate(methods.values()):
        method.settle()
        report(done + 1, rounds)
    step_s = 0.3
    for round_ in range(spec["repeats"]):
        for name in reversed(kinds):
            seconds = methods[name].block(step_s)
            if name == "ideal":
                step_s = max(row[0] for row in gather_numbers([seconds], None))
        ddp = methods["ddp"]
        if not again or again[-1] <= LONG_S:
            timed, ddp.seconds_of_steps = ddp.seconds_of_steps, []
            ddp.block(step_s)
            again += ddp.seconds_of_steps
            ddp.seconds_of_steps = timed
        report(len(kinds) + round_ + 1, rounds)
    times = {name: median(method.seconds_of_steps) for name, method in methods.items()}
    times["ddp" + AA] = median(again)
    chosen = methods["local"].local_steps
    assert chosen is not None
    assert chosen.worker is not None
    return {
        "rows": [
            {
                "method": name,
                "samples_per_s": dist.get_world_size() / times[name],
                "over_ddp": times["ddp"] / times[name],
                "fraction_of_ideal": times["ideal"] / times[name],
                "step_s": times[name],
                "wire_mb_per_step": median(methods[name.removesuffix(AA)].wire),
            }
            for name in SPEED
        ],
        "every": chosen.worker.settings.every,
        "explain": trimtab.explain(methods["local"].model),
    }


def uneven_on_rank(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
    """Hosts of unequal speed: equal batches in every step, batches by speed with local steps, each by itself."""
    shares = [round(BATCH * speed / sum(UNEVEN)) for speed in UNEVEN]
    own = shares[dist.get_rank()]

    def trainer(method: str) -> LoaderTrainer:
        task = tasks.gpt(**{**spec["model"], "context": 64}, samples=BATCH // len(UNEVEN))
        ddp = DistributedDataParallel(task.model, init_sync=False)
        if method != "local":
            return LoaderTrainer(ddp, task, lr=3e-4, samples=own, adjust=None)
        trimtab.local_steps(ddp, every=ROUND)
        return LoaderTrainer(ddp, task, lr=3e-4, shares=shares)

    trainers = {method: trainer(method) for method in ("ddp", "local", "ideal")}
    timings = take_turns(
        trainers,
        ("ideal",),
        ("ddp", "ideal"),
        warmup=1,
        repeats=spec["repeats"],
        steps=ROUND,
        report=report,
        few={"ddp": FEW},
    )
    return [
        {
            "method": method,
            "samples_per_s": 1e3 / timing.median_ms,
            "over_ddp": 1 / timing.ratio(timings["ddp"]),
            "fraction_of_ideal": 1 / timing.ratio(timings["ideal"]),
            "wire_mb_per_step": trainers[method].wire_mb,
            "shares": None if method == "ideal" else "/".join(map(str, trainers[method].data.shares)),
        }
        for method, timing in timings.items()
    ]


def loss_on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, list[list[float]]]:
    """The loss on held-out text at even distances, by method and seed; local methods by the length of a round too."""
    curves: dict[str, list[list[float]]] = {}
    every_seconds = max(1, spec["steps"] // EVALUATIONS)

    def train(method: str, seed: int, data_seed: int) -> float:
        task = tasks.gpt(**SMALL_GPT, seed=seed)
        kind, _, every = (
            method.rpartition(" ") if method not in EVERY_STEP else (method.removesuffix(AA), "", "")
        )
        model: nn.Module = task.model
        if not every:
            model = DistributedDataParallel(model)
        if kind == "trimtab":
            trimtab.compress(model, trimtab.Adaptive(), seed=seed)  # type: ignore[arg-type]
        elif every:
            trimtab.local_steps(model, every=int(every), bits=LOCAL_BITS[kind], seed=seed)
        own = local_steps_of(model)
        if kind == CANARY and own is not None and own.worker is not None:
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
                with trimtab.agreed_weights(model):
                    model.eval()
                    inner = model.module if isinstance(model, DistributedDataParallel) else model
                    curve.append(task.held_out_loss(inner))
                    model.train()
        if own is not None:
            own.close()
        curves.setdefault(method, []).append(curve)
        return curve[-1]

    local = [f"{method} {every}" for every in spec["every"] for method in LOCAL_BITS]
    final_losses((*EVERY_STEP, *local), range(spec["seeds"]), train, report)
    return curves
