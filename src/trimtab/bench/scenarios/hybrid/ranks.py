"""What each rank of `trimtab bench hybrid` does: make the plans, then train by every method in turn."""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.harness import AA, Timing
from trimtab.bench.scenarios.hybrid.plan import Made, autocast, make, samples_of, task
from trimtab.bench.scenarios.shares import shares
from trimtab.control.plans.active_plan import plan_text
from trimtab.control.plans.follower import Follow
from trimtab.planning.shares.batch import Adjust

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trimtab.bench.scenarios.shares.tasks import Task
    from trimtab.planning.plan import Plan

FLOOR, BEST = "ideal-fp32", "ideal-plan"
METHODS = ("ddp", "ddp" + AA, "uniform-low", "shares", "trimtab-fixed", "trimtab", FLOOR, BEST)
UNTRAINED = ("ddp" + AA, FLOOR, BEST)
"""Only their speed counts, so they sit out all but the last block of the warm-up."""

BLOCK, WARMUP = 3, 3
"""Steps of a method before the next has its turn, and blocks that are not measured."""

GRADIENTS = 4
"""Batches that gradient errors are taken over."""

Precisions = tuple[dict[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a method trains."""

    precisions: Precisions
    """By rank and operator."""

    samples: tuple[int, ...]
    """By rank, at first."""

    follows: bool = False
    """Whether shares follow measured speeds."""

    plan: Plan | None = field(default=None)
    alone: bool = False
    """Each rank for itself."""


def ways(made: Made, speeds: Sequence[float], each: int) -> dict[str, Way]:
    """Every method for the plans that were made."""
    even = (each,) * len(speeds)
    plain: Precisions = ({},) * len(speeds)
    total = each * len(speeds)
    by_speed = [round(total * speed / sum(speeds)) for speed in speeds]
    by_speed[0] += total - sum(by_speed)
    ddp = Way(precisions=plain, samples=even)
    free = planned(made.free)
    return {
        "ddp": ddp,
        "ddp" + AA: ddp,
        "uniform-low": Way(precisions=made.uniform, samples=even),
        "shares": Way(precisions=plain, samples=tuple(by_speed), follows=True),
        "trimtab-fixed": planned(made.fixed),
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


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, Any]:
    """Rows of rates, shares, gradient errors; and the plans, for whoever trains by them to the end."""
    from trimtab.bench.scenarios.hybrid.hybrid import cluster_of

    torch.set_num_threads(1)
    device = torch.device(spec["device"])
    of = task(device, size=spec.get("size"))
    repeats, warmup, block = spec["repeats"], spec.get("warmup", WARMUP), spec.get("block", BLOCK)
    rounds = warmup + repeats
    report(0, rounds + 1)
    made = make(of, cluster_of(spec["speeds"], spec["device"]), device, spec["memory"])
    report(1, rounds + 1)
    every = ways(made, spec["speeds"], of.each)
    fits = {method: _fits(made, way, of, device) for method, way in every.items()}
    trainers = {method: Trainer(of, device, way) for method, way in every.items() if fits[method]}
    taken: dict[str, list[float]] = {method: [] for method in trainers}
    for round_ in range(rounds):
        lasted = 0.0
        for method, trainer in trainers.items():
            if round_ < warmup - 1 and method in UNTRAINED:
                continue
            rate, seconds = trainer.alone(lasted) if every[method].alone else trainer.block(block)
            lasted = max(lasted, seconds)
            if round_ >= warmup:
                taken[method].append(1 / rate)
        report(round_ + 2, rounds + 1)
    timings = {method: Timing(samples=tuple(values)) for method, values in taken.items()}
    errors = gradient_errors({m: t for m, t in trainers.items() if m not in UNTRAINED}, of, device)
    return {
        "rows": [_row(method, way, trainers.get(method), timings, errors) for method, way in every.items()],
        "plans": {"trimtab-fixed": plan_text(made.fixed), "trimtab": plan_text(made.free)},
        "ways": {m: {"precisions": w.precisions, "samples": w.samples} for m, w in every.items() if fits[m]},
        "predicted": {
            name: {"step_s": plan.predicted.step_s, "plain_step_s": plan.predicted.plain_step_s}
            for name, plan in (("fixed", made.fixed), ("free", made.free))
        },
        "reasons": {"fixed": made.fixed.reasons, "free": made.free.reasons},
        "choices": {
            name: {
                o: {p: [c.seconds, c.damage] for p, c in several.items()} for o, several in of_role.items()
            }
            for name, of_role in ((n, role.choices) for n, role in made.fixed.roles.items())
        },
    }


def _row(
    method: str,
    way: Way,
    trainer: Trainer | None,
    timings: Mapping[str, Timing],
    errors: Mapping[str, float],
) -> dict[str, Any]:
    timing = timings.get(method)
    dealt = way.samples if trainer is None or way.alone else trainer.data.shares
    return {
        "method": method,
        "samples_per_s": None if timing is None else 1e3 / timing.median_ms,
        "spread": None if timing is None else timing.spread,
        "fraction_of_ideal": None if timing is None else 1 / timing.ratio(timings[BEST]),
        "over_ddp": None if timing is None or "ddp" not in timings else 1 / timing.ratio(timings["ddp"]),
        "fits": timing is not None,
        "shares": "/".join(map(str, dealt)),
        "operators_lowered": sum(map(len, way.precisions)),
        "precisions": "/".join(sorted({p for own in way.precisions for p in own.values()})) or None,
        "bits": None if way.plan is None else way.plan.bits,
        "gradient_error": errors.get(method),
    }


class Trainer(shares.Trainer):
    """One method's model, optimiser and data."""

    def __init__(
        self,
        of: Task,
        device: torch.device,
        way: Way,
        *,
        seed: int = 0,
        draw: int = 0,
        follow: bool = True,
    ) -> None:
        """`seed` is that of the random rounding, `draw` that of the order of the data."""
        own = of.each
        if way.alone:
            own = way.samples[dist.get_rank()]
        self._task = replace(of, each=own)
        self._method, self._device = "", device
        self._world = dist.get_world_size()
        self.precisions = way.precisions[dist.get_rank()]
        self.ddp = DistributedDataParallel(deepcopy(of.model))
        if way.plan is not None:
            trimtab.apply(self.ddp, way.plan, seed=seed, follow=Follow() if follow else None)
        else:
            trimtab.set_precision(self.ddp, self.precisions, seed=seed)
        settings: dict[str, Any] = {"shares": way.samples}
        if way.plan is not None:
            settings = {"plan": self.ddp}
        self.data = trimtab.loader(
            of.train,
            of.each * self._world,
            adjust=Adjust() if way.follows else None,
            drop_last=True,
            seed=draw,
            **settings,
        )
        self._optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-3)
        self._batches: Iterator[Any] = iter(())
        self._paused = ExitStack()
        self._step_s = 0.0

    def gradient(self, batch: torch.Tensor) -> torch.Tensor:
        """Of the mean loss of a batch of all ranks, each computing its part; added up exactly, whatever the bits."""
        dealt = self.data.shares
        first = sum(dealt[: dist.get_rank()])
        own = batch[first : first + dealt[dist.get_rank()]]
        self._optimizer.zero_grad()
        with self.ddp.no_sync():
            (self._loss(own) * (len(own) / len(batch))).backward()
        flat = torch.cat([p.grad.flatten().double() for p in self.ddp.parameters() if p.grad is not None])
        self._optimizer.zero_grad()
        dist.all_reduce(flat)
        return flat


def gradient_errors(trainers: Mapping[str, Trainer], of: Task, device: torch.device) -> dict[str, float]:
    """‖gradient − gradient with nothing lowered‖ over the latter, at one and the same weights and batches.

    Root of the mean of squares over batches. The weights are those that plain training, or the first method that
    fits, has arrived at.
    """
    first = next(iter(trainers.values()))
    weights = {name: value.clone() for name, value in first.ddp.module.state_dict().items()}
    total = of.each * dist.get_world_size()
    batches = [samples_of(of.train, 50_000 + i * total, total, device) for i in range(GRADIENTS)]
    for trainer in trainers.values():
        trainer.ddp.module.load_state_dict(weights)
    trimtab.set_precision(first.ddp, {})
    plain = [first.gradient(batch) for batch in batches]
    trimtab.set_precision(first.ddp, first.precisions)
    found = {}
    for method, trainer in trainers.items():
        squares = [
            float((trainer.gradient(batch) - right).square().sum() / right.square().sum())
            for batch, right in zip(batches, plain, strict=True)
        ]
        found[method] = sqrt(sum(squares) / len(squares))
    return found


def _fits(made: Made, way: Way, of: Task, device: torch.device) -> bool:
    """Whether every rank has the memory: as predicted, and on a GPU also tried, with no more than that."""
    limits = [made.cluster.devices[rank.device].memory_gib for rank in made.cluster.ranks()]
    if limits[0] is None:
        return True
    bits = None if way.plan is None else way.plan.bits
    predicted = [
        made.peak(samples, precisions, 4 if bits == "adaptive" else bits)
        for samples, precisions in zip(way.samples, way.precisions, strict=True)
    ]
    if device.type == "cuda":
        return _tried(of, device, way, limits[dist.get_rank()] or 0.0)
    return all(peak <= (limit or 0) * 2**30 for peak, limit in zip(predicted, limits, strict=True))


def _tried(of: Task, device: torch.device, way: Way, gib: float) -> bool:
    """One step of this rank's own work in so much memory; the verdict is everyone's."""
    rank = dist.get_rank()
    whole = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    # What the process holds besides is no part of the job.
    torch.cuda.set_per_process_memory_fraction((gib * 2**30 + torch.cuda.memory_allocated()) / whole)
    fits = torch.ones(1, device=device)
    model = optimizer = buckets = None
    try:
        model = trimtab.set_precision(deepcopy(of.model), way.precisions[rank])
        buckets = [torch.empty_like(parameter) for parameter in model.parameters()]  # DDP's
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):  # the optimiser has its state from the second step on
            with autocast(device):
                loss = of.loss(model, samples_of(of.train, 0, way.samples[rank], device))
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
