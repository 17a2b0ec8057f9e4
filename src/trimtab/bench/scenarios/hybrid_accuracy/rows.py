"""`trimtab bench hybrid-accuracy`: what lower precision on a slow rank does to accuracy, and what a plan saves of it.

The experiment of QSync with small models from scratch: a fast rank in fp32 and a slow one in uniformly low precision,
in the precisions that a plan chooses at the same step time, or with fewer samples. First this machine is probed, plans
are made and steps are timed, one after the other; then every method trains every setting with every seed. int4 is the
canary: a comparison that does not flag it cannot see damage. How runs are compared: `compare`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

import torch.distributed as dist

from trimtab.bench.harness import Progress, Result
from trimtab.bench.ranks import hosts, run_on_cluster
from trimtab.bench.scenarios.hybrid_accuracy import planned
from trimtab.bench.scenarios.hybrid_accuracy.compare import diverged, gap_to
from trimtab.bench.scenarios.hybrid_accuracy.methods import (
    AGAIN,
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
        own[index] = train(setting, every[method], seed, steps)
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


def _rows(
    name: str, finals: Mapping[str, list[dict[str, float]]], timed: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    losses = {method: [one["loss"] for one in several] for method, several in finals.items()}
    errors = {method: [1 - one["accuracy"] for one in several] for method, several in finals.items()}
    exact_losses, exact_errors = ({m: of[m] for m in (FP32, *AGAIN)} for of in (losses, errors))
    rows = {}
    for method, several in finals.items():
        loss = gap_to(exact_losses, losses[method], method)
        error = gap_to(exact_errors, errors[method], method)
        lost = diverged(losses[method], [one["untrained"] for one in several], losses[FP32])
        accuracies = [one["accuracy"] for one in several]
        rows[method] = {
            "model": name,
            "method": method,
            "accuracy": mean(accuracies),
            "accuracy_spread": stdev(accuracies),
            "loss": mean(losses[method]),
            "gap_to_fp32": error.mean,
            "gap_low": error.low,
            "gap_high": error.high,
            "loss_gap": loss.mean,
            "loss_gap_low": loss.low,
            "loss_gap_high": loss.high,
            "diverged": lost,
            "worse": lost > 0 or max(error.low, loss.low) > 0,
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
            f"{plan} loss_gap_at_most": rows[plan]["loss_gap_high"],
            f"{plan} gradient_error_over_uniform": rows[plan]["gradient_error"]
            / rows[UNIFORM]["gradient_error"],
        }
    for uniform in (UNIFORM, TENSOR):
        figures[f"{uniform} worse"] = rows[uniform]["worse"]
        if rows[uniform]["worse"]:
            # By the measure that shows the gap: loss, which is the finer one, if both do.
            gap = "loss_gap" if rows[uniform]["loss_gap_low"] > 0 else "gap_to_fp32"
            figures[f"plan recovers of {uniform}"] = 1 - rows[PLAN][gap] / rows[uniform][gap]
    for method in (FP32, DBS):
        figures[f"{method} step_over_uniform"] = rows[method]["step_over_uniform"]
    return figures
