"""`trimtab bench predict`: predicted step times compared with measured ones.

Every kind of plan has a module here with one function that returns its rows (`KINDS`). What all kinds have in
common: a job is one model on an emulated cluster. In every round its ranks are probed, then the plans are predicted
from that probe, and only then are they measured, each twice. Neither a plan's own time nor any step with
communication ever enters a prediction. Errors are medians over rounds of predicted over measured, so that a machine
whose speed drifts is compared with itself. How long predicting itself takes: `benchmarks/studies/predict_speed.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from trimtab.bench.harness import Progress, Result, part
from trimtab.bench.scenarios.predict.ddp import ddp_rows
from trimtab.bench.scenarios.predict.exchange import accumulate_rows, adaptive_rows, route_rows
from trimtab.bench.scenarios.predict.fsdp import fsdp_rows
from trimtab.bench.scenarios.predict.tensor import data_x_tensor_rows, tensor_rows
from trimtab.errors import TrimtabError

KINDS: dict[str, Callable[[str, int, Progress], list[dict[str, Any]]]] = {
    "ddp": ddp_rows,
    "fsdp": fsdp_rows,
    "route": route_rows,
    "adaptive": adaptive_rows,
    "accumulate": accumulate_rows,
    "tensor": tensor_rows,
    "data x tensor": data_x_tensor_rows,
}
"""By kind of plan: the rows (`rows.row`) from the device ("cpu" or "cuda"), the number of rounds and the progress."""


def predict(device: str, rounds: int, only: Sequence[str], progress: Progress) -> Result:
    """The rows of these kinds of plans, or of all."""
    unknown = sorted(set(only) - KINDS.keys())
    if unknown:
        raise TrimtabError(f"--only: there is no kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    kinds = list(only or KINDS)
    rows = [
        {"kind": kind, **row}
        for index, kind in enumerate(kinds)
        for row in KINDS[kind](device, rounds, part(progress, index, len(kinds)))
    ]
    if not rows:
        raise TrimtabError(f"--only: {', '.join(kinds)} cannot be measured with --device {device}")
    return Result(bench="predict", summary={"device": device, **summary(rows)}, rows=rows)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures over all plans, then for each kind; regret over jobs."""
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    jobs: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], []).append(row)
        jobs.setdefault((row["kind"], row["model"], row["link"]), []).append(row)
    regrets = [regret(job) for job in jobs.values()]
    naive = [abs(row["naive_error"]) for row in rows if "naive_error" in row]
    memory = [abs(row["memory_error"]) for row in rows if "memory_error" in row]
    return {
        **_errors(rows),
        **({"naive_mean_error": mean(naive)} if naive else {}),
        "regret": mean(regrets),
        "worst_regret": max(regrets),
        **({"memory_error": max(memory)} if memory else {}),
        **{f"{key} ({kind})": value for kind, own in by_kind.items() for key, value in _errors(own).items()},
    }


def _errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    errors = [abs(row["error"]) for row in rows]
    return {
        "plans": len(rows),
        "mean_error": mean(errors),
        "max_error": max(errors),
        "repeat_error": mean(abs(row["repeat_error"]) for row in rows),
    }


def regret(job: Sequence[Mapping[str, Any]]) -> float:
    """By how much the plan that was predicted to be the fastest is slower than the one that is."""
    chosen = min(job, key=lambda row: float(row["predicted_ms"]))
    return float(chosen["measured_ms"] / min(row["measured_ms"] for row in job)) - 1
