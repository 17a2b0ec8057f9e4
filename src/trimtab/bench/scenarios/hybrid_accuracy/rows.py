"""`trimtab bench hybrid-accuracy`: what lower precision on a slow rank does to accuracy, and what a plan saves of it.

The experiment of QSync with small models from scratch: a fast rank in fp32 and a slow one in uniformly low precision,
in the precisions that a plan chooses at the same step time, or with fewer samples. First this machine is probed, plans
are made and steps are timed, one after the other; then every method trains every setting with every seed. int4 is the
canary: a comparison that does not flag it cannot see damage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch.distributed as dist

from trimtab.bench.harness import AA, Progress, Result
from trimtab.bench.losses import SIGMAS
from trimtab.bench.ranks import hosts, run_on_cluster
from trimtab.bench.scenarios.hybrid_accuracy import planned
from trimtab.bench.scenarios.hybrid_accuracy.methods import (
    CANARY,
    DBS,
    FP32,
    METHODS,
    PLAN,
    PLAN_INT8,
    TENSOR,
    UNIFORM,
    train,
    ways,
)
from trimtab.bench.scenarios.hybrid_accuracy.settings import SETTINGS
from trimtab.errors import TrimtabError

SPEED = 0.6
"""Of the slow rank, the fast one's being 1."""

ALL_SEEDS = 10
"""Seeds of `--full`."""

LEAST_NOISE = 1e-6
"""Nothing is measured more exactly, even if the A/A row happens to hit fp32's own figures."""

TIMED_PART = 100
"""Progress of probing and timing, in thousandths of the whole."""


def hybrid_accuracy(seeds: int, repeats: int, full: bool, only: Sequence[str], progress: Progress) -> Result:
    """The settings named by `only`, or all."""
    if unknown := [name for name in only if name not in SETTINGS]:
        raise TrimtabError(f"there is no setting {unknown[0]!r} of this bench; choose {', '.join(SETTINGS)}")
    spec: dict[str, Any] = {
        "settings": [name for name in SETTINGS if name in only or not only],
        "speed": SPEED,
        "repeats": repeats,
        "seeds": max(seeds, ALL_SEEDS) if full else seeds,
    }
    timed = run_on_cluster(
        hosts((1.0,)),
        planned.on_rank,
        spec,
        lambda done, total: progress(done * TIMED_PART // total, 1000),
    )
    spec["plans"] = {name: of_setting["plans"] for name, of_setting in timed.items()}
    trained = run_on_cluster(
        hosts((1.0, 1.0)),
        on_rank,
        spec,
        lambda done, total: progress(TIMED_PART + done * (1000 - TIMED_PART) // total, 1000),
    )
    return result(timed, trained, SPEED)


def on_rank(spec: Mapping[str, Any], report: Progress) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Accuracy and loss by setting, method and seed. The runs are dealt out to the ranks, each is of one process."""
    runs = [
        (name, method, spec["seeds"] * again + seed)
        for seed in range(spec["seeds"])
        for method in METHODS
        for name in spec["settings"]
        for again in range(SETTINGS[name].runs)
    ]
    own: dict[int, dict[str, float]] = {}
    mine = range(dist.get_rank(), len(runs), dist.get_world_size())
    for done, index in enumerate(mine):
        name, method, seed = runs[index]
        setting = SETTINGS[name]
        every = ways(setting.make(seed).model, spec["plans"][name], spec["speed"])
        steps = spec.get("steps", setting.steps)
        own[index] = train(setting, every[method], seed, steps, nudged=method.endswith(AA))
        report(done + 1, len(mine))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    found = {index: figures for part in everyone for index, figures in part.items()}
    finals: dict[str, dict[str, list[dict[str, float]]]] = {}
    for index, (name, method, _) in enumerate(runs):
        finals.setdefault(name, {}).setdefault(method, []).append(found[index])
    return finals


def result(timed: Mapping[str, Any], trained: Mapping[str, Any], speed: float) -> Result:
    """Rows of every setting and method, and what they say."""
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"speed_of_the_slow_rank": speed}
    for name, finals in trained.items():
        own = _rows(name, finals, timed[name])
        rows += own.values()
        summary |= {f"{name} {key}": value for key, value in verdicts(own).items()}
    visible = [
        f"{row['model']} {row['method']}"
        for row in rows
        if row["method"] in (UNIFORM, TENSOR) and row["worse"]
    ]
    flagged = [row["model"] for row in rows if row["method"] == CANARY and row["worse"]]
    summary["canary_flagged"] = ", ".join(flagged) or "nowhere: these comparisons cannot see damage"
    summary["visible_gaps"] = ", ".join(visible) or (
        "none: int8 on the slow rank is nowhere worse than fp32 beyond the noise of seeds, so there is nothing that a "
        "plan could recover"
    )
    return Result(bench="hybrid-accuracy", summary=summary, rows=rows)


class Comparison(NamedTuple):
    """Of a method with fp32."""

    gap: float
    """Mean over the seeds."""

    over_noise: float


def compared(finals: Mapping[str, Sequence[float]]) -> dict[str, Comparison]:
    """Every method with fp32, seed by seed: same weights, same data.

    Noise is the standard error of a mean gap that chance makes: the root of the mean square of the A/A row's gaps,
    over the root of their number. A method's own scatter does not count: one that now and then diverges must not pass
    because of it.
    """
    gaps = {
        method: [value - own for value, own in zip(values, finals[FP32], strict=True)]
        for method, values in finals.items()
    }
    chance = gaps[FP32 + AA]
    noise = max(sqrt(mean(gap * gap for gap in chance) / len(chance)), LEAST_NOISE)
    return {method: Comparison(mean(several), mean(several) / noise) for method, several in gaps.items()}


def _rows(
    name: str, finals: Mapping[str, list[dict[str, float]]], timed: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    losses = compared({method: [one["loss"] for one in several] for method, several in finals.items()})
    errors = compared(
        {method: [1 - one["accuracy"] for one in several] for method, several in finals.items()}
    )
    rows = {}
    for method, several in finals.items():
        accuracies = [one["accuracy"] for one in several]
        rows[method] = {
            "model": name,
            "method": method,
            "accuracy": mean(accuracies),
            "accuracy_spread": stdev(accuracies),
            "loss": mean(one["loss"] for one in several),
            "gap_to_fp32": errors[method].gap,
            "gap_over_noise": errors[method].over_noise,
            "loss_gap": losses[method].gap,
            "loss_gap_over_noise": losses[method].over_noise,
            "worse": max(errors[method].over_noise, losses[method].over_noise) > SIGMAS,
            **timed["methods"][method],
            "seeds": len(several),
        }
    return rows


def verdicts(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of one setting."""
    figures: dict[str, Any] = {"canary_flagged": rows[CANARY]["worse"]}
    for plan in (PLAN, PLAN_INT8):
        figures |= {
            f"{plan} step_over_uniform": rows[plan]["step_over_uniform"],
            f"{plan} worse": rows[plan]["worse"],
            f"{plan} gradient_error_over_uniform": rows[plan]["gradient_error"]
            / rows[UNIFORM]["gradient_error"],
        }
    for uniform in (UNIFORM, TENSOR):
        figures[f"{uniform} worse"] = rows[uniform]["worse"]
        if rows[uniform]["worse"]:
            # By the measure that shows the gap more clearly.
            by_loss = rows[uniform]["loss_gap_over_noise"] > rows[uniform]["gap_over_noise"]
            gap = "loss_gap" if by_loss else "gap_to_fp32"
            figures[f"plan recovers of {uniform}"] = 1 - rows[PLAN][gap] / rows[uniform][gap]
    for method in (FP32, DBS):
        figures[f"{method} step_over_uniform"] = rows[method]["step_over_uniform"]
    return figures
