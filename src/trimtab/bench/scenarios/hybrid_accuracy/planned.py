"""The plans of `trimtab bench hybrid-accuracy`, made from a probe of this machine, and the step time of each method.

This machine is the slow rank, at its own speed; the fast one is so many times faster. A plan lowers the slow rank
just enough to keep the pace of uniformly low precision, or of the fast rank if that is slower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.bench.harness import Progress, Timing, interleave, part
from trimtab.bench.ranks import hosts
from trimtab.bench.scenarios.hybrid_accuracy.methods import (
    AGAIN,
    CANARY,
    DBS,
    FP32,
    PLAN,
    PLAN_INT8,
    UNIFORM,
    Pair,
    Way,
    lowerable,
    ways,
)
from trimtab.bench.scenarios.hybrid_accuracy.settings import SETTINGS, Setting
from trimtab.cluster import Cluster
from trimtab.cluster.profile import LOCAL
from trimtab.measure.damage.indicators import gradient_damage
from trimtab.measure.device import Task as Probe
from trimtab.measure.job import probe_job
from trimtab.measure.products import usual_precisions
from trimtab.measure.timing import call_seconds
from trimtab.models.spec import ModelSpec
from trimtab.models.tasks import Task
from trimtab.planning.job_search import JobSearch
from trimtab.planning.precision.allocate import allocate
from trimtab.planning.precision.options import damages_of, lowered
from trimtab.planning.precision.starting_point import Lowerable
from trimtab.precision_names import OWN
from trimtab.predict.collectives import Placement
from trimtab.predict.step_setting import StepSetting
from trimtab.workload import Workload

SLOW = "slow"
TRAINED = 20
"""Steps in fp32 before damage is computed: a model that has learned nothing yet is hardly sensitive to rounding."""

CALIBRATION, GRADIENTS, WARMUP = 2, 4, 3
"""Batches that damage is computed from, and that gradient errors are averaged over; rounds that are not timed."""


def on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, Any]:
    """By setting: the plans' precisions, step times and gradient errors by method, and what was predicted."""
    measured = {}
    names = spec["settings"]
    for index, name in enumerate(names):
        of_setting = part(report, index, len(names))
        measured[name] = planned_and_timed(
            name, spec.get("trained", TRAINED), spec["speed"], spec["repeats"], of_setting
        )
    return measured


def planned_and_timed(
    name: str, trained: int, speed: float, repeats: int, progress: Progress
) -> dict[str, Any]:
    """What `on_rank` returns of one setting."""
    setting = SETTINGS[name]
    task = setting.make(0)
    _warmed_up(task, setting, trained)
    low = usual_precisions(task.device)
    cluster, workload = _probed(name, task, low)
    batches = [task.batch(2 * task.samples, step=10_000 + i) for i in range(CALIBRATION)]
    damages = gradient_damage(task.model, batches, precisions=low)
    plans, predicted = {}, {}
    for method, offered in ((PLAN, low), (PLAN_INT8, ("int8",))):
        own = {
            operator: {p: damage for p, damage in by.items() if p in offered}
            for operator, by in damages.items()
            if operator in workload.settings
        }
        plans[method], predicted[method] = least_damage(
            cluster, workload, own, task.samples, lowerable(task.model), speed
        )
    every = ways(task.model, plans, speed)
    timings = step_times(task, every, speed, repeats, progress)
    errors = gradient_errors(task, every)
    return {
        "plans": plans,
        "predicted": predicted,
        "methods": {
            method: {
                **(timings[method].step if method in timings else {"step_ms": None, "spread": None}),
                "step_over_uniform": timings[method].ratio(timings[UNIFORM]) if method in timings else None,
                "operators_lowered": len(way.precisions),
                "precisions": _in_words(method, way),
                "gradient_error": errors[method],
            }
            for method, way in every.items()
        },
    }


def _in_words(method: str, way: Way) -> str | None:
    """Such as ``3 bf16, 2 int8``; None if nothing is lowered."""
    counts = Counter("int4" if method == CANARY else p for p in way.precisions.values())
    return ", ".join(f"{count} {precision}" for precision, count in sorted(counts.items())) or None


def _warmed_up(task: Task, setting: Setting, steps: int) -> None:
    pair = Pair(task, Way(precisions={}), 0)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=setting.lr)
    for step in range(steps):
        pair.backward(pair.batch(step, 0))
        optimizer.step()
        optimizer.zero_grad()


def _probed(name: str, task: Task, low: Sequence[str]) -> tuple[Cluster, Workload]:
    """The slow rank's operators in each precision, measured as `trimtab probe` does."""
    cluster = hosts((1.0,), names=(SLOW,))
    samples = task.samples
    spec = ModelSpec(name=name, model=deepcopy(task.model), batch=task.batch(step=20_000))
    probe = Probe(spec=spec, batches=(samples // 2, samples), precisions=tuple(low), bits=(), seconds=inf)
    probed = probe_job(probe, task.device, [SLOW], Placement.on(cluster), LOCAL)
    return replace(cluster, profile=probed.profile), probed.workload


def least_damage(
    cluster: Cluster,
    workload: Workload,
    damages: Mapping[str, Mapping[str, float]],
    samples: int,
    uniform: Sequence[str],
    speed: float,
) -> tuple[dict[str, str], dict[str, float]]:
    """The least damaging precisions that keep the pace of all `uniform` operators in int8; and predicted seconds."""
    search = JobSearch(cluster, workload, damages, samples)
    job = search.even(StepSetting()).replayed
    plain_s = job.step_s()
    options = search.tradeoffs.menu(SLOW, samples).options
    offered = {o: [option.precision for option in several] for o, several in options.items()}
    changes = [job.change(SLOW, o, "int8") for o in uniform if "int8" in offered.get(o, ())]
    uniform_s = job.step_s()
    for change in reversed(changes):
        job.undo(change)
    pace_s = max(uniform_s, speed * plain_s)
    role = Lowerable(damages=damages_of(options), alike=search.alike)
    allocation = allocate(job, {SLOW: role}, others_s=pace_s)
    assert all(OWN in several for several in offered.values())
    seconds = {"plain_s": plain_s, "uniform_s": uniform_s, "pace_s": pace_s, "plan_s": allocation.step_s}
    return lowered(allocation.chosen[SLOW]), seconds


def step_times(
    task: Task, every: Mapping[str, Way], speed: float, repeats: int, progress: Progress
) -> dict[str, Timing]:
    """Step times of the two ranks without communication, interleaved; each rank's are measured on this machine.

    Only those of real operators. The A/A row is fp32 once more, without what changes its results.
    """
    total = 2 * task.samples

    def case(way: Way, samples: int) -> partial[float]:
        model = way.lowered(deepcopy(task.model), 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        batch = task.batch(samples, step=30_000)
        return partial(call_seconds, partial(_step, model, optimizer, batch), task.device)

    timed = {method: way for method, way in every.items() if not way.simulated} | {AGAIN[0]: every[FP32]}
    cases = {method: case(way, way.samples(total)[1]) for method, way in timed.items()}
    dbs = every[DBS].samples(total)[0]
    fast = {FP32: case(every[FP32], task.samples), DBS: case(every[DBS], dbs)}
    cases |= {f"fast {name}": run for name, run in fast.items()}
    seconds = interleave(cases, warmup=WARMUP, repeats=repeats, progress=progress)
    timings = {}
    for method in timed:
        others = seconds[f"fast {method if method in fast else FP32}"].samples
        pairs = zip(seconds[method].samples, others, strict=True)
        timings[method] = Timing(samples=tuple(max(slow, speed * other) for slow, other in pairs))
    return timings


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> None:
    model(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def gradient_errors(task: Task, every: Mapping[str, Way]) -> dict[str, float]:
    """‖gradient − gradient in fp32‖ over the latter, at the same weights and batches: root of the mean of squares."""
    squares: dict[str, list[float]] = {method: [] for method in every}
    pairs = {method: Pair(task, way, 0) for method, way in every.items()}
    plain = Pair(task, Way(precisions={}), 0)
    for index in range(GRADIENTS):
        batch = plain.batch(40_000 + index, 0)
        exact = _gradient(plain, batch)
        for method, pair in pairs.items():
            error = _gradient(pair, batch) - exact
            squares[method].append(float(error.square().sum() / exact.square().sum()))
    return {method: sqrt(sum(several) / GRADIENTS) for method, several in squares.items()}


def _gradient(pair: Pair, batch: tuple[Tensor, ...]) -> Tensor:
    pair.fast.zero_grad()
    pair.backward(batch)
    gradients = [p.grad.flatten().double() for p in pair.fast.parameters() if p.grad is not None]
    pair.fast.zero_grad()
    return torch.cat(gradients)
