"""`trimtab bench product`: hosts uneven in links and speeds, by each adjustment alone and by a plan with all of them.

One job: the ranks are probed and planned for as a user's would be, then every method trains in blocks of steps that
take turns. `ideal` is the sum of the rates of ranks that train by themselves, all at the same time. What the methods do
to the loss is measured in a second job, on equal ranks and the same batches: a rank's speed does not change what it
computes. `time_to_loss_s` combines both: the steps until plain DDP's loss is reached, at the measured pace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

import trimtab
from trimtab.bench.harness import AA, Progress, Result, Timing, part
from trimtab.bench.losses import final_losses, judged
from trimtab.bench.ranks import hosts, run_on_cluster
from trimtab.bench.scenarios.hybrid.plan import make_plans, make_task
from trimtab.bench.scenarios.hybrid.ranks import Way, make_trainer, planned
from trimtab.bench.trainer import LoaderTrainer, take_turns
from trimtab.cluster import Cluster, Device, Host, Link
from trimtab.codec import Block
from trimtab.control.plans.active_plan import plan_text
from trimtab.errors import TrimtabError
from trimtab.models.tasks import Task
from trimtab.planning.plan import Plan, parse_plan

IDEAL, CANARY = "ideal", "1-bit (canary)"
SINGLE = ("compress", "shares", "precision")
METHODS = ("ddp", "ddp" + AA, *SINGLE, "joint", IDEAL)
UNSETTLED = ("compress", "shares", "joint")
"""What adapts while it trains; the others sit out all but the last block of the warm-up."""

SIZES = {"cpu": (384, 6, 32, 4), "cuda": (1024, 12, 512, 16)}
"""Width, layers, bytes of a sample, and samples of a rank when all have the same."""

BLOCK, WARMUP = 2, 7
"""Steps of a method before the next has its turn, and blocks that are not measured."""

STEPS, SMOOTHED = 24, 5
"""Of the runs that compare losses: steps, and over how many of them training losses are averaged."""

REACHED = 0.9
"""The loss to reach is plain DDP's after this part of its steps."""

Runs = dict[str, dict[str, Any]]


def cluster(device: str) -> Cluster:
    """Host a with two fast ranks, b with a slower one, and c with a slow one behind a slow link; or parts of a GPU."""
    if device == "cuda":
        return hosts((1 / 2, 1 / 4, 1 / 6), device)
    speeds = {"a": 1.0, "b": 0.7, "c": 0.4}
    return Cluster(
        version=1,
        devices={name: Device(kind="cpu", speed=speed) for name, speed in speeds.items()},
        links={"gbit": Link(gbit_per_s=1.0), "slow": Link(gbit_per_s=0.2)},
        hosts=(
            Host(name="a", devices={"a": 2}, link="gbit"),
            Host(name="b", devices={"b": 1}, link="gbit"),
            Host(name="c", devices={"c": 1}, link="slow"),
        ),
    )


def as_probed(emulated: Cluster) -> Cluster:
    """The cluster as `trimtab probe` describes it: one link between all hosts, which is measured."""
    if not emulated.links:
        return emulated
    slowest = min(link.gbit_per_s for link in emulated.links.values())
    return replace(
        emulated,
        links={"link": Link(gbit_per_s=slowest)},
        hosts=tuple(replace(host, link="link") for host in emulated.hosts),
    )


def product(device: str, repeats: int, seeds: int, progress: Progress) -> Result:
    """Speeds in one job, losses in another."""
    emulated = cluster(device)
    spec: dict[str, Any] = {"device": device, "repeats": repeats, "seeds": seeds}
    measured = run_on_cluster(emulated, on_rank, spec, part(progress, 0, 2))
    equal = hosts((1.0,) * emulated.world_size, device)
    trained = run_on_cluster(equal, lose_on_rank, {**spec, "runs": measured["runs"]}, part(progress, 1, 2))
    rows = with_losses(measured["rows"], trained, measured["batch_size"])
    summary = {"device": device, **figures(rows), **measured["said"]}
    return Result(bench="product", summary=summary, rows=rows)


def on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, Any]:
    """Probe, plan, and train by every method in turn: the rows of speeds, and what to compare the losses of."""
    device = torch.device(spec["device"])
    task = make_task(device, size=spec.get("size") or SIZES[spec["device"]])
    report(0, 1)
    as_planned = as_probed(cluster(spec["device"]))
    if dist.get_world_size() != as_planned.world_size:
        raise TrimtabError(f"bench product needs {as_planned.world_size} ranks; got {dist.get_world_size()}")
    plans = make_plans(task, as_planned, fixed_bits=None)
    every = ways(as_planned, plans.fixed, plans.free, task.samples)
    lowers = any(every["precision"].precisions)
    trainers = {m: trainer_of(m, task, way) for m, way in every.items() if lowers or m != "precision"}
    timings = take_turns(
        trainers,
        (IDEAL,),
        [method for method in METHODS if method not in UNSETTLED],
        warmup=spec.get("warmup", WARMUP),
        repeats=spec["repeats"],
        steps=spec.get("block", BLOCK),
        report=lambda done, total: report(done + 1, total + 1),
    )
    if not lowers:  # then it is plain DDP
        trainers["precision"] = trainers["ddp"]
        timings = {method: timings.get(method, timings["ddp"]) for method in every}
    batch_size = task.samples * dist.get_world_size()
    said = {
        "joint": "; ".join(plans.free.reasons),
        "compress": trimtab.explain(trainers["compress"].model),
        "lowered_alone": sum(map(len, every["precision"].precisions)),
    }
    if not said["lowered_alone"]:
        said["precision"] = "no lower precision is faster here, so this row is plain DDP"
    return {
        "rows": rates(every, trainers, timings, predictions(plans.fixed, plans.free), batch_size),
        "batch_size": batch_size,
        "said": said,
        "runs": runs(every),
    }


def ways(as_planned: Cluster, fixed: Plan, free: Plan, samples: int) -> dict[str, Way]:
    """How each method trains; `samples` is an even share."""
    speeds = [as_planned.devices[rank.device].speed for rank in as_planned.ranks()]
    total = samples * len(speeds)
    by_speed = [max(1, round(total * speed / sum(speeds))) for speed in speeds]
    by_speed[0] += total - sum(by_speed)
    ddp = Way(precisions=({},) * len(speeds), samples=(samples,) * len(speeds))
    return {
        "ddp": ddp,
        "ddp" + AA: ddp,
        "compress": ddp,
        "shares": replace(ddp, samples=tuple(by_speed), follows=True),
        "precision": planned(fixed),
        "joint": planned(free),
        IDEAL: replace(ddp, alone=True),
    }


def trainer_of(method: str, task: Task, way: Way, *, forced: bool = False, **options: Any) -> LoaderTrainer:
    """One method's model, optimizer and data; `forced` compresses also where that does not pay."""
    trainer = make_trainer(task, way, **options)
    if method == "compress":
        trimtab.compress(trainer.model, trimtab.Adaptive() if forced else None)  # type: ignore[arg-type]
    elif method == CANARY:
        # In large blocks the noise of one bit is many times the gradient, which no optimizer averages out.
        noisy = Block(bits=1, block=1 << 14)
        trimtab.compress(trainer.model, noisy, error_feedback=False)  # type: ignore[arg-type]
    return trainer


def predictions(fixed: Plan, free: Plan) -> dict[str, float]:
    """The predicted step of every method that has a prediction."""
    alone = free.predicted.alone
    return {
        "ddp": free.predicted.plain_step_s,
        "precision": fixed.predicted.step_s,
        "joint": free.predicted.step_s,
        **{
            method: alone[key] for method, key in (("compress", "bits"), ("shares", "shares")) if key in alone
        },
    }


def rates(
    every: Mapping[str, Way],
    trainers: Mapping[str, LoaderTrainer],
    timings: Mapping[str, Timing],
    predicted: Mapping[str, float],
    batch_size: int,
) -> list[dict[str, Any]]:
    """A row for each method, without its losses."""
    rows = []
    for method, timing in timings.items():
        way, step_s = every[method], batch_size * timing.median_ms / 1e3
        shares = way.samples if way.alone else trainers[method].data.shares
        rows.append(
            {
                "method": method,
                "samples_per_s": 1e3 / timing.median_ms,
                "spread": timing.spread,
                "fraction_of_ideal": 1 / timing.ratio(timings[IDEAL]),
                "over_ddp": 1 / timing.ratio(timings["ddp"]),
                "predicted_over_measured": predicted[method] / step_s if method in predicted else None,
                "shares": "/".join(map(str, shares)),
                "operators_lowered": sum(map(len, way.precisions)),
                "bits": None if way.plan is None else way.plan.bits,
                "wire_mb": None if way.alone else trainers[method].wire_mb,
            }
        )
    return rows


# Losses


def runs(every: Mapping[str, Way]) -> Runs:
    """What to train to its loss: every method that may differ from plain DDP, and the canary.

    Shares do not: every sample counts the same. Where nothing is lowered, `precision` does not either.
    """
    chosen: Runs = {}
    for method, way in every.items():
        if way.alone or method == "shares" or (method == "precision" and not any(way.precisions)):
            continue
        plan = None if way.plan is None else plan_text(way.plan)
        chosen[method] = {"precisions": way.precisions, "samples": way.samples, "plan": plan}
    return {**chosen, CANARY: chosen["ddp"]}


def lose_on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, dict[str, list[Any]]]:
    """By run and seed: the loss on held-out text after the last step, and the training loss of every step."""
    device = torch.device(spec["device"])
    curves: dict[str, list[list[float]]] = {method: [] for method in spec["runs"]}

    def train(method: str, seed: int, data_seed: int) -> float:
        run = spec["runs"][method]
        if run["plan"] is not None:
            way = replace(planned(parse_plan(run["plan"], source=method)), follows=False)
        else:
            way = Way(precisions=tuple(map(dict, run["precisions"])), samples=tuple(run["samples"]))
        task = make_task(device, seed, spec.get("size") or SIZES[spec["device"]])
        options: dict[str, Any] = {"seed": seed, "data_seed": data_seed, "follow": False}
        trainer = trainer_of(method, task, way, forced=True, **options)
        part_of_batch = way.samples[dist.get_rank()] / sum(way.samples)
        steps = spec.get("steps", STEPS)
        optimizer = trainer.optimizer
        # At a constant learning rate the last loss is that of a few steps before or after a spike.
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, optimizer.param_groups[0]["lr"], total_steps=steps, cycle_momentum=False
        )
        losses = []
        for step in range(steps):
            losses.append(trainer.train(trainer.batch(step)) * part_of_batch)
            schedule.step()
        curve = torch.stack(losses).float()
        dist.all_reduce(curve)
        curves[method].append(curve.tolist())
        trimtab.set_precision(trainer.model, {})  # judged as the model that would be used
        return trainer.held_out_loss()

    finals = final_losses(spec["runs"], range(spec["seeds"]), train, report)
    return {"finals": finals, "curves": curves}


def steps_to(curves: Sequence[Sequence[float]], loss: float) -> int | None:
    """Steps until the training loss, averaged over seeds and `SMOOTHED` steps, is at most `loss`, if it ever is."""
    for step, value in enumerate(_smooth(curves)):
        if value <= loss:
            return step + SMOOTHED
    return None


def _smooth(curves: Sequence[Sequence[float]]) -> list[float]:
    by_step = [mean(values) for values in zip(*curves, strict=True)]
    return [mean(by_step[i : i + SMOOTHED]) for i in range(len(by_step) - SMOOTHED + 1)]


def with_losses(
    rows: Sequence[Mapping[str, Any]], trained: Mapping[str, Mapping[str, Any]], batch_size: int
) -> list[dict[str, Any]]:
    """The rows with what was lost, and one for the canary. A method that was not trained is plain DDP."""
    verdicts, curves = judged(trained["finals"]), trained["curves"]
    smooth = _smooth(curves["ddp"])
    target = smooth[int(REACHED * (len(smooth) - 1))]
    result = []
    for row in [*rows, {"method": CANARY}]:
        method = row["method"]
        if method == IDEAL:
            result.append(dict(row))
            continue
        run = method if method in verdicts else "ddp"
        steps, rate = steps_to(curves[run], target), row.get("samples_per_s")
        result.append(
            {
                **row,
                "time_to_loss_s": None if steps is None or rate is None else steps * batch_size / rate,
                "final_loss": verdicts[run]["final_loss"],
                "loss_gap": verdicts[run]["gap"],
                "worse": verdicts[run]["worse"],
            }
        )
    return result


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The summary: what the plan brings over plain DDP and over the best of its parts, and what it does to the loss."""
    by_method = {row["method"]: row for row in rows}
    rate: dict[str, float] = {row["method"]: row["samples_per_s"] for row in rows if "samples_per_s" in row}
    best = max(SINGLE, key=lambda method: rate[method])
    return {
        "aa_ratio": rate["ddp" + AA] / rate["ddp"],
        "joint_over_ddp": rate["joint"] / rate["ddp"],
        "best_single": best,
        "joint_over_best_single": rate["joint"] / rate[best],
        "joint_fraction_of_ideal": by_method["joint"]["fraction_of_ideal"],
        "joint_predicted_over_measured": by_method["joint"]["predicted_over_measured"],
        "joint_worse": by_method["joint"]["worse"],
        "canary_flagged": by_method[CANARY]["worse"],
    }
