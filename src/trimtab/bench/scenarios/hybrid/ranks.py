"""What each rank of `trimtab bench hybrid` runs: it makes the plans, then trains by every method in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.harness import AA, Progress, Timing
from trimtab.bench.ranks import hosts
from trimtab.bench.scenarios.hybrid.plan import NAMES, Plans, make_plans, make_task, samples_of
from trimtab.bench.trainer import LoaderTrainer, autocast, lost, take_turns
from trimtab.codec import Block
from trimtab.control.plans.active_plan import plan_text
from trimtab.control.plans.follower import Follow
from trimtab.errors import TrimtabError
from trimtab.models.tasks import Task
from trimtab.planning.plan import Plan
from trimtab.planning.shares.batch import Adjust

FLOOR, BEST = "ideal-fp32", "ideal-plan"
METHODS = ("ddp", "ddp" + AA, "uniform-low", "shares", "trimtab-fixed", "trimtab", FLOOR, BEST)
UNTRAINED = ("ddp" + AA, FLOOR, BEST)
"""Only their speed counts, so they sit out all but the last block of the warm-up."""

BLOCK, WARMUP = 3, 3
"""Steps of a method before the next has its turn, and blocks that are not measured."""

SENT: dict[str, int | None] = {"cpu": None, "cuda": 4}
"""Bits of the gradients of every method that is compared, so that methods differ in precisions and shares alone. Parts
of a GPU exchange over NCCL's sockets, which in fp32 would take half of a step."""

GRADIENTS = 4
"""Batches over which gradient errors are averaged."""

Precisions = tuple[dict[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a method trains."""

    precisions: Precisions
    """By rank and operator."""

    samples: tuple[int, ...]
    """By rank, at the start."""

    follows: bool = False
    """Whether shares follow measured speeds."""

    plan: Plan | None = field(default=None)
    bits: int | None = None
    """Of gradients, where there is no plan."""

    alone: bool = False
    """Each rank trains by itself."""


def ways(plans: Plans, speeds: Sequence[float], samples: int, bits: int | None) -> dict[str, Way]:
    """Every method, given the plans; `samples` is an even share, and `bits` are those of the plans."""
    even = (samples,) * len(speeds)
    plain: Precisions = ({},) * len(speeds)
    total = samples * len(speeds)
    by_speed = [round(total * speed / sum(speeds)) for speed in speeds]
    by_speed[0] += total - sum(by_speed)
    ddp = Way(precisions=plain, samples=even)
    free = planned(plans.free)
    return {
        "ddp": ddp,
        "ddp" + AA: ddp,
        "uniform-low": Way(precisions=plans.uniform, samples=even, bits=bits),
        "shares": Way(precisions=plain, samples=tuple(by_speed), follows=True, bits=bits),
        "trimtab-fixed": planned(plans.fixed),
        "trimtab": free,
        FLOOR: replace(ddp, alone=True),
        BEST: replace(free, plan=None, alone=True),
    }


def planned(plan: Plan) -> Way:
    ranks = [plan.roles[plan.role_of(rank)] for rank in range(plan.world_size)]
    return Way(
        precisions=tuple(dict(role.precisions) for role in ranks),
        samples=plan.shares,
        follows=plan.batch == "free",
        plan=plan,
    )


def on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, Any]:
    """Rows of rates, shares and gradient errors; and the plans, for the runs that compare losses."""
    device = torch.device(spec["device"])
    task = make_task(device, size=spec.get("size"))
    report(0, 1)
    cluster = hosts(spec["speeds"], spec["device"], names=NAMES)
    bits = SENT[device.type]
    plans = make_plans(task, cluster, spec["memory"], bits=bits, fixed_bits=bits)
    every = ways(plans, spec["speeds"], task.samples, bits)
    fitting = {method: way for method, way in every.items() if _fits(plans, way, task)}
    trainers = {method: make_trainer(task, way) for method, way in fitting.items()}
    timings = take_turns(
        trainers,
        (FLOOR, BEST),
        UNTRAINED,
        warmup=spec.get("warmup", WARMUP),
        repeats=spec["repeats"],
        steps=spec.get("block", BLOCK),
        report=lambda done, total: report(done + 1, total + 1),
    )
    trained = {method: trainer for method, trainer in trainers.items() if method not in UNTRAINED}
    errors = gradient_errors(trained, fitting, task)
    steps = spec["repeats"] * spec.get("block", BLOCK)
    named = {"fixed": plans.fixed, "free": plans.free}
    return {
        "rows": [
            _row(method, way, trainers.get(method), timings, errors, steps) for method, way in every.items()
        ],
        "plans": {"trimtab-fixed": plan_text(plans.fixed), "trimtab": plan_text(plans.free)},
        "ways": {
            m: {"precisions": way.precisions, "samples": way.samples, "bits": way.bits}
            for m, way in fitting.items()
        },
        "predicted": {
            name: {"step_s": plan.predicted.step_s, "plain_step_s": plan.predicted.plain_step_s}
            for name, plan in named.items()
        },
        "reasons": {name: plan.reasons for name, plan in named.items()},
        "choices": {
            name: {
                operator: {
                    precision: [choice.seconds, choice.damage] for precision, choice in options.items()
                }
                for operator, options in role.choices.items()
            }
            for name, role in plans.fixed.roles.items()
        },
    }


def _row(
    method: str,
    way: Way,
    trainer: LoaderTrainer | None,
    timings: Mapping[str, Timing],
    errors: Mapping[str, float],
    steps: int,
) -> dict[str, Any]:
    timing = timings.get(method)
    missing: dict[str, float] = {}
    if method == "trimtab" and timing is not None and trainer is not None and trainer.own_steps:
        # Where the rest goes: only here is the ideal that of the same precisions.
        step_s, ideal_s = (sum(way.samples) * fmean(t.samples) for t in (timing, timings[BEST]))
        missing = lost(trainer.own_steps[-steps:], step_s, ideal_s)
    shares = way.samples if trainer is None or way.alone else trainer.data.shares
    return {
        "method": method,
        "samples_per_s": None if timing is None else 1e3 / timing.median_ms,
        "spread": None if timing is None else timing.spread,
        "fraction_of_ideal": None if timing is None else 1 / timing.ratio(timings[BEST]),
        "over_ddp": None if timing is None or "ddp" not in timings else 1 / timing.ratio(timings["ddp"]),
        "fits": timing is not None,
        "shares": "/".join(map(str, shares)),
        "operators_lowered": sum(map(len, way.precisions)),
        "precisions": "/".join(sorted({p for own in way.precisions for p in own.values()})) or None,
        "bits": way.bits if way.plan is None else way.plan.bits,
        "gradient_error": errors.get(method),
        **missing,
    }


def make_trainer(
    task: Task, way: Way, *, seed: int = 0, data_seed: int = 0, follow: bool = True
) -> LoaderTrainer:
    """One method's model, optimizer and data; `seed` is that of the random rounding."""
    cap = None if way.plan is None else way.plan.bucket_cap_mb
    ddp = DistributedDataParallel(deepcopy(task.model), bucket_cap_mb=cap)
    settings: dict[str, Any] = {"shares": way.samples}
    if way.plan is not None:
        trimtab.apply(ddp, way.plan, seed=seed, follow=Follow() if follow else None)
        settings = {"plan": ddp}
    else:
        trimtab.set_precision(ddp, way.precisions[dist.get_rank()], seed=seed)
        if way.bits is not None:
            trimtab.compress(ddp, Block(bits=way.bits), seed=seed)
    settings |= {"adjust": Adjust() if way.follows else None, "seed": data_seed}
    own = way.samples[dist.get_rank()] if way.alone else None
    return LoaderTrainer(ddp, task, lr=1e-3, samples=own, **settings)


def gradient(trainer: LoaderTrainer, batch: torch.Tensor) -> torch.Tensor:
    """The gradient of the mean loss of the global batch: each rank computes its share, and they are summed exactly."""
    shares = trainer.data.shares
    first = sum(shares[: dist.get_rank()])
    own = batch[first : first + shares[dist.get_rank()]]
    trainer.optimizer.zero_grad()
    with trainer.model.no_sync():  # type: ignore[operator]
        (trainer.forward((own,)) * (len(own) / len(batch))).backward()
    gradients = [p.grad.flatten().double() for p in trainer.model.parameters() if p.grad is not None]
    trainer.optimizer.zero_grad()
    flat = torch.cat(gradients)
    dist.all_reduce(flat)
    return flat


def gradient_errors(
    trainers: Mapping[str, LoaderTrainer], every: Mapping[str, Way], task: Task
) -> dict[str, float]:
    """‖gradient − gradient with nothing lowered‖ over the latter, at the same weights and batches.

    Root of the mean of squares over batches. The weights are those of plain training, or of the first method that
    fits.
    """
    reference, first = next(iter(trainers.items()))
    weights = {name: value.clone() for name, value in first.module.state_dict().items()}
    total = task.samples * dist.get_world_size()
    batches = [samples_of(task, 50_000 + i * total, total) for i in range(GRADIENTS)]
    for trainer in trainers.values():
        trainer.module.load_state_dict(weights)
    trimtab.set_precision(first.model, {})
    plain = [gradient(first, batch) for batch in batches]
    if not all(exact.isfinite().all() for exact in plain):
        raise TrimtabError(f"bench hybrid: gradients of plain training are not finite after {reference!r}")
    trimtab.set_precision(first.model, every[reference].precisions[dist.get_rank()])
    errors = {}
    for method, trainer in trainers.items():
        squares = [
            float((gradient(trainer, batch) - exact).square().sum() / exact.square().sum())
            for batch, exact in zip(batches, plain, strict=True)
        ]
        errors[method] = sqrt(sum(squares) / len(squares))
    return errors


def _fits(plans: Plans, way: Way, task: Task) -> bool:
    """Whether every rank has the memory: as predicted, and on a GPU also tried, with no more than that."""
    limits = [plans.cluster.devices[rank.device].memory_gib for rank in plans.cluster.ranks()]
    if limits[0] is None:
        return True
    if task.device.type == "cuda":
        return _tried(task, way, limits[dist.get_rank()] or 0.0)
    predicted = [
        plans.peak(samples, precisions)
        for samples, precisions in zip(way.samples, way.precisions, strict=True)
    ]
    return all(peak <= (limit or 0) * 2**30 for peak, limit in zip(predicted, limits, strict=True))


def _tried(task: Task, way: Way, gib: float) -> bool:
    """Whether one step of every rank's own work fits into its memory."""
    rank = dist.get_rank()
    whole = torch.cuda.get_device_properties(task.device).total_memory
    torch.cuda.empty_cache()
    # What the process already holds does not belong to the job.
    torch.cuda.set_per_process_memory_fraction((gib * 2**30 + torch.cuda.memory_allocated()) / whole)
    fits = torch.ones(1, device=task.device)
    model = optimizer = buckets = None
    try:
        model = trimtab.set_precision(deepcopy(task.model), way.precisions[rank])
        buckets = [torch.empty_like(parameter) for parameter in model.parameters()]  # DDP's
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):  # the optimizer has its state from the second step on
            with autocast(task.device):
                loss = model(samples_of(task, 0, way.samples[rank]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except torch.OutOfMemoryError:
        fits.zero_()
    del model, optimizer, buckets
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
    dist.all_reduce(fits, op=dist.ReduceOp.MIN)
    return bool(fits)
