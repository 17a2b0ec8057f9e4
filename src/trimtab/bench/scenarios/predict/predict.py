"""`trimtab bench predict`: predicted step times compared with measured ones.

Each job is one model on an emulated cluster of two unequal ranks. In every round both ranks are probed
(single steps without communication, in one precision throughout and at three batch sizes; the link; the codec),
then the plans are predicted from that probe, and only then are they measured, each twice. Neither a plan's own time
nor any step with communication ever enters a prediction. Errors are medians over rounds of predicted over measured,
so that a machine whose speed drifts is compared with itself. How long predicting itself takes:
`benchmarks/studies/predict_speed.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

from trimtab.bench.harness import Progress, Result, part
from trimtab.bench.ranks import run_on_cluster
from trimtab.bench.scenarios.predict.ranks import on_rank, two_ranks

MODELS = {"cpu": ("gpt", "conv", "bert"), "cuda": ("gpt", "gpt2", "vit")}
LINKS = {"cpu": ("300mbit", "1gbit"), "cuda": ("none",)}


class HeldOutPlan(NamedTuple):
    """What the two ranks do."""

    shares: tuple[int, int]
    """Units of samples."""

    low: str
    """Which operators of the slow rank are in low precision: `none`, `all`, or every second or third."""

    bits: int | None

    def __str__(self) -> str:
        return f"{self.shares[0]}/{self.shares[1]}, low {self.low}, {self.bits or 'fp32'} bits"


PLANS = {
    "300mbit": (
        HeldOutPlan((4, 4), "half", None),
        HeldOutPlan((5, 3), "third", 4),
        HeldOutPlan((4, 4), "half", 4),
        HeldOutPlan((5, 3), "none", 8),
    ),
    "1gbit": (
        HeldOutPlan((5, 3), "half", None),
        HeldOutPlan((5, 3), "all", 8),
        HeldOutPlan((5, 3), "third", 8),
        HeldOutPlan((6, 2), "half", 4),
    ),
    "none": (
        HeldOutPlan((4, 4), "half", None),
        HeldOutPlan((5, 3), "none", None),
        HeldOutPlan((5, 3), "third", 4),
        HeldOutPlan((5, 3), "all", 4),
        HeldOutPlan((6, 2), "half", 8),
        HeldOutPlan((3, 5), "none", 4),
    ),
}


def predict(device: str, rounds: int, progress: Progress) -> Result:
    """Every model over every link."""
    models, links = MODELS[device], LINKS[device]
    rows: list[dict[str, Any]] = []
    for index, link in enumerate(links):
        rows += predict_jobs(device, models, link, PLANS[link], rounds, part(progress, index, len(links)))
    return Result(bench="predict", summary={"device": device, **summary(rows)}, rows=rows)


def predict_jobs(
    device: str,
    models: Sequence[str],
    link: str,
    plans: Sequence[HeldOutPlan],
    rounds: int,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """A row for each plan of each model; one emulated cluster trains the models one after another."""
    spec = {
        "device": device,
        "models": list(models),
        "link": link,
        "plans": list(plans),
        "rounds": rounds,
    }
    measured = run_on_cluster(two_ranks(device, link), on_rank, spec, progress)
    return [
        {"model": model, "link": link, **_row(plan, of_plan)}
        for model, of_model in zip(models, measured, strict=True)
        for plan, of_plan in zip(plans, of_model, strict=True)
    ]


def _row(plan: HeldOutPlan, rounds: Mapping[str, Any]) -> dict[str, Any]:
    measured, again = rounds["measured"], rounds["again"]
    both = [mean(pair) for pair in zip(measured, again, strict=True)]

    def error(predicted: Sequence[float]) -> float:
        return float(median(p / m for p, m in zip(predicted, both, strict=True))) - 1

    return {
        "plan": str(plan),
        "predicted_ms": median(rounds["predicted"]) * 1e3,
        "measured_ms": median(both) * 1e3,
        "error": error(rounds["predicted"]),
        "naive_error": error(rounds["naive"]),
        "repeat_error": median(a / b for a, b in zip(again, measured, strict=True)) - 1,
        **({"memory_error": max((r - 1 for r in rounds["memory"]), key=abs)} if "memory" in rounds else {}),
        "bottleneck": rounds["bottleneck"],
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures over all plans; regret over jobs."""
    errors = [abs(row["error"]) for row in rows]
    jobs: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        jobs.setdefault((row["model"], row["link"]), []).append(row)
    regrets = [regret(job) for job in jobs.values()]
    return {
        "plans": len(rows),
        "mean_error": mean(errors),
        "max_error": max(errors),
        "repeat_error": mean(abs(row["repeat_error"]) for row in rows),
        "naive_mean_error": mean(abs(row["naive_error"]) for row in rows),
        "regret": mean(regrets),
        "worst_regret": max(regrets),
        **({"memory_error": max(abs(r["memory_error"]) for r in rows)} if "memory_error" in rows[0] else {}),
    }


def regret(job: Sequence[Mapping[str, Any]]) -> float:
    """By how much the plan that was predicted to be the fastest is slower than the one that is."""
    chosen = min(job, key=lambda row: float(row["predicted_ms"]))
    return float(chosen["measured_ms"] / min(row["measured_ms"] for row in job)) - 1
