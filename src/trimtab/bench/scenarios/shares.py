"""`trimtab bench shares`: uneven ranks with equal batches, with batches by speed, and at their physical best.

Every method trains the same model on the same global batches, in blocks of steps that take turns. `ideal` is what no
data-parallel job can beat: each rank trains by itself on the batch it has under plain DDP, all at the same time,
nobody waits for anybody, and the rates are added. Shares change nothing about the training, so the losses must agree;
the canary, which counts each rank's mean alike, shows that the comparison would see it if they did not.

What is missing to `ideal` is divided by the ranks' own times of each step: the mean of the slowest rank beyond ideal
(balance), how much longer the slowest of each step takes (variation), and the rest (exchanging gradients).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.harness import AA, Progress, Result, part
from trimtab.bench.ranks import hosts, run_on_cluster
from trimtab.bench.trainer import LoaderTrainer, lost, take_turns
from trimtab.codec import Block
from trimtab.models import tasks
from trimtab.planning.shares.batch import Adjust

SPEEDS = {"cpu": ((1.0, 0.4), (1.0, 0.7, 0.4)), "cuda": ((0.7, 0.3),)}
MODELS = {"cpu": ("gpt", "digits"), "cuda": ("gpt2",)}
CANARY = "mean of means (canary)"
COMPRESSED = "shares, 4 bits"
METHODS = {
    "cpu": ("ddp", "ddp" + AA, "shares", "ideal"),
    "cuda": ("ddp", "ddp" + AA, "shares", COMPRESSED, "ideal"),
}
UNTRAINED = ("ddp" + AA, "ideal")
"""Only their speed counts, so they sit out all but the last block of the warm-up."""

BLOCK = 4
"""Steps of a method before the next has its turn."""

WARMUP = 10
"""Blocks in which shares settle, as they do in the first steps of a job; not measured."""

CONTENTION = (0.4, 40, 90, 140)
"""Speed left to the second of two equal hosts, from which step, to which, and steps in all."""


def shares(device: str, repeats: int, progress: Progress) -> Result:
    """Every speed and model in a job of its own; on CPU also a rank that slows down and recovers."""
    from trimtab.emulate import parse_contention

    jobs = [(speeds, model) for speeds in SPEEDS[device] for model in MODELS[device]]
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"device": device}
    count = len(jobs) + (device == "cpu")
    for index, (speeds, model) in enumerate(jobs):
        spec: dict[str, Any] = {"device": device, "model": model, "speeds": speeds}
        spec |= {"warmup": WARMUP, "repeats": repeats, "block": BLOCK}
        measured = run_on_cluster(hosts(speeds, device), on_rank, spec, part(progress, index, count))
        name = "/".join(f"{speed:g}" for speed in speeds)
        rows += [{"speeds": name, "model": model, **row} for row in measured]
        summary |= _figures(f"{model}_{name}", {row["method"]: row for row in measured})
    if device == "cpu":
        left, start, end, steps = CONTENTION
        slowdown = parse_contention(f"b={left}@{start}:{end}")
        spec = {"device": device, "steps": steps}
        second = run_on_cluster(hosts((1.0, 1.0)), follow_contention, spec, schedule=[slowdown])
        summary |= reaction(second, start, end)
        progress(count, count)
    return Result(bench="shares", summary=summary, rows=rows)


def on_rank(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
    """All methods in turn, block by block; rates of the last `repeats` blocks."""
    device = torch.device(spec["device"])
    trainers = {method: make_trainer(method, spec["model"], device) for method in METHODS[device.type]}
    blocks = spec["warmup"] + spec["repeats"]
    timings = take_turns(
        trainers,
        ("ideal",),
        UNTRAINED,
        warmup=spec["warmup"],
        repeats=spec["repeats"],
        steps=spec["block"],
        report=lambda done, total: report(done, total + 1),
    )
    canary = make_trainer(CANARY, spec["model"], device, speeds=spec["speeds"])
    for _ in range(blocks):
        canary.block(spec["block"])
    report(blocks + 1, blocks + 1)
    rows = [
        {
            "method": method,
            "samples_per_s": 1e3 / timing.median_ms,
            "spread": timing.spread,
            "fraction_of_ideal": 1 / timing.ratio(timings["ideal"]),
            "shares": None if method == "ideal" else "/".join(map(str, trainers[method].data.shares)),
            "final_loss": None if method in UNTRAINED else trainers[method].held_out_loss(),
        }
        for method, timing in timings.items()
    ]
    if device.type == "cpu":
        own = trainers["shares"].own_steps[-spec["repeats"] * spec["block"] :]
        samples = sum(trainers["shares"].data.shares)
        step_s, ideal_s = (samples * fmean(timings[name].samples) for name in ("shares", "ideal"))
        next(row for row in rows if row["method"] == "shares").update(lost(own, step_s, ideal_s))
    shared = "/".join(map(str, canary.data.shares))
    return [*rows, {"method": CANARY, "shares": shared, "final_loss": canary.held_out_loss()}]


def follow_contention(spec: Mapping[str, Any], report: Progress) -> list[float]:
    """The second rank's part of the batch in every step."""
    trainer = make_trainer("shares", "gpt", torch.device(spec["device"]))
    parts = []
    for step in range(spec["steps"]):
        trainer.train(trainer.batch(step))
        parts.append(trainer.data.shares[1] / sum(trainer.data.shares))
    return parts


def reaction(parts: Sequence[float], start: int, end: int) -> dict[str, Any]:
    """How soon a share follows: the steps until it has gone eight tenths of its way."""
    before, during, after = (float(median(parts[stop - 10 : stop])) for stop in (start, end, len(parts)))

    def steps(phase: Sequence[float], old: float, new: float) -> int:
        near = [abs(share - new) <= 0.2 * abs(new - old) for share in phase]
        return near.index(True)

    return {
        "contention_share_before": before,
        "contention_share_during": during,
        "contention_share_after": after,
        "reaction_steps": steps(parts[start:end], before, during),
        "recovery_steps": steps(parts[end:], during, after),
    }


def make_trainer(
    method: str, model: str, device: torch.device, *, speeds: Sequence[float] | None = None
) -> LoaderTrainer:
    """One method's model, optimizer and data; `speeds` fixes the shares."""
    task = make_task(model, device)
    ddp = DistributedDataParallel(task.model)
    if method == COMPRESSED:
        trimtab.compress(ddp, Block(bits=4))
    adjust = Adjust() if method in ("shares", COMPRESSED) else None
    return LoaderTrainer(ddp, task, lr=3e-4, weighted=method != CANARY, shares=speeds, adjust=adjust)


def make_task(name: str, device: torch.device) -> tasks.Task:
    """What is trained, by name: `gpt`, `digits`, or on a GPU `gpt2`."""
    if name == "digits":
        return tasks.convnet(128, 192, device)
    if name == "gpt2":
        return tasks.gpt2(16, device)
    return tasks.gpt(width=128, layers=2, heads=4, context=64, samples=64, device=device)


def _figures(name: str, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of one job: the best method over plain DDP and against ideal, and what it did to the loss."""
    best = rows.get(COMPRESSED, rows["shares"])
    rest = {f"{name}_{key}": value for key, value in best.items() if key.startswith("lost_to_")}
    loss = rows["ddp"]["final_loss"]
    return {
        f"{name}_fraction_of_ideal": best["fraction_of_ideal"],
        **rest,
        f"{name}_over_ddp": best["samples_per_s"] / rows["ddp"]["samples_per_s"],
        f"{name}_loss_gap": abs(rows["shares"]["final_loss"] - loss),
        f"{name}_canary_gap": abs(rows[CANARY]["final_loss"] - loss),
        f"{name}_aa_ratio": rows["ddp" + AA]["samples_per_s"] / rows["ddp"]["samples_per_s"],
    }
