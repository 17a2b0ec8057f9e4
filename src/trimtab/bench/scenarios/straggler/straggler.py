"""`trimtab bench straggler`: a tensor-parallel job with slow ranks, and what can be done about them.

Rows: `even`; `shares` by speeds measured before; `resize-random` and `resize-priority`, which leave out as much of
the slow rank's work as it is too slow for; `migrate`, which leases that work to the others in every step; `semi`, the
controller, exact; `semi-resize`, the controller allowed to leave out half; `ideal`, the best split of the times that
the ranks of the even run needed, plus its collectives without waits. All train the same model on the same data.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from trimtab.bench.harness import AA, Progress, Result, Timing, interleave, part
from trimtab.bench.ranks import hosts, run_on_cluster
from trimtab.bench.scenarios.straggler.bursts import bursts
from trimtab.bench.scenarios.straggler.links import links
from trimtab.bench.scenarios.straggler.method import SIZES, Method
from trimtab.bench.trainer import ideal
from trimtab.errors import TrimtabError

STATIC: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "gpt-half": {"model": "gpt", "speeds": [1.0, 0.5]},
        "gpt-quarter": {"model": "gpt", "speeds": [1.0, 0.25]},
        "vit-half": {"model": "vit", "speeds": [1.0, 0.5]},
        "bert-half": {"model": "bert", "speeds": [1.0, 0.5]},
        "llama-half": {"model": "llama", "speeds": [1.0, 0.5]},
    },
    "cuda": {
        "gpt-half": {"model": "gpt", "speeds": [1.0, 0.5]},
        "gpt-quarter": {"model": "gpt", "speeds": [1.0, 0.25]},
        "gpt-two": {"model": "gpt", "speeds": [1.0, 1.0, 0.5, 0.5]},
        # An eighth is the smallest part of a GPU: the slow ones repeat their products.
        "gpt-eight": {"model": "gpt", "speeds": [1.0] * 6 + [0.5] * 2, "repeated": True},
        "vit-half": {"model": "vit", "speeds": [1.0, 0.5]},
        "bert-half": {"model": "bert", "speeds": [1.0, 0.5]},
        "llama-half": {"model": "llama", "speeds": [1.0, 0.5]},
    },
}
TRAINED = ("even", "resize-random", "resize-priority", "semi", "semi-resize")
"""Trained from the start; the others only while times are measured."""

CONTENDED = ("even", "semi", "semi-resize")
CONTENTION = {"speed": 0.25, "start": 12, "end": 60, "steps": 104}
"""Speed left to the second of two equal ranks, from which step, to which, and steps in all."""

SETTLE = 42
"""Steps before times are measured."""

SEEDS = 5
NEAR = 1.15
"""Steps count as settled once they stay within this many times their final length."""

ONLY = (
    "gpt-half",
    "gpt-quarter",
    "gpt-two",
    "gpt-eight",
    "vit-half",
    "bert-half",
    "llama-half",
    "contention",
    "bursts",
    "links",
    "seeds",
)


def straggler(device: str, repeats: int, only: Sequence[str], progress: Progress) -> Result:
    """Every setting in a job of its own; its rows go to standard error as soon as they are measured."""
    unknown = [name for name in only if name not in ONLY]
    if unknown:
        raise TrimtabError(f"bench straggler: there is no setting {unknown[0]!r}; choose {', '.join(ONLY)}")
    # What leaving work out does to the loss is always measured on CPU ranks; on a GPU machine only if named.
    every = (
        *STATIC[device],
        "contention",
        "bursts",
        "links",
        *(("seeds",) if device == "cpu" or only else ()),
    )
    wanted = [name for name in every if not only or name in only]
    if not wanted:
        raise TrimtabError(
            f"bench straggler: {', '.join(only)} is not measured on {device}, which has {', '.join(every)}"
        )
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"device": device}
    failed: list[TrimtabError] = []
    for index, name in enumerate(wanted):
        try:
            measured, figures = _setting(name, device, repeats, part(progress, index, len(wanted)))
        except TrimtabError as error:  # the other settings are worth having without this one
            failed.append(error)
            summary[name] = f"not measured: {error}"
            continue
        for row in measured:
            print(
                " ".join(f"{key}={_short(value)}" for key, value in row.items()), file=sys.stderr, flush=True
            )
        rows += measured
        summary |= figures
    if failed and len(failed) == len(wanted):
        raise failed[0]
    return Result(bench="straggler", summary=summary | _overall(rows), rows=rows)


def _setting(
    name: str, device: str, repeats: int, progress: Progress
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows and figures of one setting."""
    spec: dict[str, Any] = {**SIZES[device], "device": device}
    if name in STATIC[device]:
        spec |= {**STATIC[device][name], "repeats": repeats, "settle": SETTLE}
        speeds = [1.0] * len(spec["speeds"]) if spec.get("repeated") else spec["speeds"]
        rows = run_on_cluster(hosts(speeds, device), on_rank, spec, progress, throttle="gemm")
        return [{"setting": name, **row} for row in rows], _static_figures(name, rows)
    if name == "contention":
        spec |= {**CONTENTION, "model": "gpt", "speeds": [1.0, 1.0]}
        rows = run_on_cluster(hosts(spec["speeds"], device), follow_contention, spec, progress)
        return [{"setting": name, **row} for row in rows], _contention_figures(rows)
    if name == "bursts":
        return bursts(device, progress)
    return links(device, progress) if name == "links" else _seeds(progress)


def on_rank(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
    """All methods with ranks of fixed speeds: the first steps, then measured rounds, interleaved."""
    from trimtab.emulate.throttling.repeated_products import RepeatedProducts

    speed = spec["speeds"][dist.get_rank()] if spec.get("repeated") else 1.0
    state: Any = SimpleNamespace(speed=speed)
    _kept = RepeatedProducts(state, spec["device"]) if speed < 1 else None
    trainers = {method: Method(spec, method) for method in (*TRAINED, "even" + AA, "shares")}
    trainers["migrate"] = Method(spec, "migrate", leased=trainers["shares"].counts)
    total = spec["settle"] + spec["repeats"]
    for step in range(spec["settle"]):
        for method in TRAINED:
            trainers[method].step()
        report(step + 1, total)
    timings = interleave(
        {method: trainer.step for method, trainer in trainers.items()},
        warmup=2,
        repeats=spec["repeats"],
        progress=lambda done, _: report(spec["settle"] + done - 2, total),
    )
    timings["ideal"] = ideal(trainers["even"].local_times[-spec["repeats"] :], trainers["even"].device)
    rows = []
    for method, timing in timings.items():
        row: dict[str, Any] = {"method": method, **timing.step, "over_ideal": timing.ratio(timings["ideal"])}
        if method in trainers:
            row |= _trained(trainers[method], trainers["even"])
        if method.startswith("semi"):
            row |= _controlled(trainers[method], trainers["even"], timing)
        rows.append(row)
    return rows


def _trained(trainer: Method, even: Method) -> dict[str, Any]:
    gaps = [abs(a - b) for a, b in zip(trainer.losses[:50], even.losses[:50], strict=False)]
    return {
        "final_loss": trainer.losses[-1],
        "steps": len(trainer.losses),
        "loss_gap": max(gaps),
        "units": trainer.units,
    }


def _controlled(trainer: Method, even: Method, timing: Timing) -> dict[str, Any]:
    return {
        "reaction_steps": settled_after(_over(trainer.seconds, even.seconds), len(timing.samples)),
        "watching_over_step": trainer.watching() / median(timing.samples),
        "decisions": [_described(record) for record in trainer.records()],
    }


def settled_after(seconds: Sequence[float], late: int, *, run: int = 5) -> int:
    """The first step from which the median of the next few is near that of the `late` last ones."""
    final = median(seconds[-late:])
    for step in range(len(seconds) - run + 1):
        if median(seconds[step : step + run]) <= NEAR * final:
            return step
    return len(seconds)


def _over(seconds: Sequence[float], even: Sequence[float]) -> list[float]:
    """Steps over those of the even run at the same time: what slows the whole machine cancels out."""
    return [a / b for a, b in zip(seconds, even, strict=True)]


def _described(record: Any) -> dict[str, Any]:
    return {
        "step": record.step,
        "mode": record.decision.mode,
        "actions": list(record.decision.actions),
        "shares": list(record.decision.shares),
        "pruned": list(record.decision.pruned),
        "predicted_ms": record.decision.predicted * 1e3,
        "measured_ms": None if record.measured is None else record.measured * 1e3,
        "took_ms": record.took * 1e3,
    }


def follow_contention(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
    """Two equal ranks, the second of which is slow for a while."""
    from trimtab.emulate.throttling.repeated_products import RepeatedProducts

    state: Any = SimpleNamespace(speed=1.0)
    _kept = RepeatedProducts(state, spec["device"])
    trainers = {method: Method(spec, method) for method in CONTENDED}
    for step in range(spec["steps"]):
        slow = spec["start"] <= step < spec["end"] and dist.get_rank() == 1
        state.speed = spec["speed"] if slow else 1.0
        for trainer in trainers.values():
            trainer.step()
        report(step + 1, spec["steps"])
    state.speed = 1.0
    start, end, last = spec["start"], spec["end"], spec["steps"]
    late = 8  # steps at the end of a phase, when everything has settled
    even = trainers["even"]
    floors = {
        phase: ideal(even.local_times[stop - late : stop], even.device)
        for phase, stop in (("during", end), ("after", last))
    }
    rows: list[dict[str, Any]] = []
    for method, trainer in trainers.items():
        during, after = trainer.seconds[start:end], trainer.seconds[end:]
        row: dict[str, Any] = {
            "method": method,
            "step_ms": sum(trainer.seconds[start:]) / len(trainer.seconds[start:]) * 1e3,
            "over_ideal": Timing(samples=tuple(during[-late:])).ratio(floors["during"]),
            "over_ideal_after": Timing(samples=tuple(after[-late:])).ratio(floors["after"]),
            **_trained(trainer, even),
        }
        if method != "even":
            row["reaction_steps"] = settled_after(_over(during, even.seconds[start:end]), late)
            row["recovery_steps"] = settled_after(_over(after, even.seconds[end:]), late)
            row["decisions"] = [_described(record) for record in trainer.records()]
        rows.append(row)
    return rows


def _static_figures(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    methods = {row["method"]: row for row in rows}
    semi = methods["semi"]
    return {
        f"{name}_even_over_ideal": methods["even"]["over_ideal"],
        f"{name}_semi_over_ideal": semi["over_ideal"],
        f"{name}_reaction_steps": semi["reaction_steps"],
        f"{name}_semi_loss_gap": semi["loss_gap"],
        f"{name}_semi_resize_over_ideal": methods["semi-resize"]["over_ideal"],
        f"{name}_aa_ratio": methods["even" + AA]["step_ms"] / methods["even"]["step_ms"],
    }


def _contention_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    methods = {row["method"]: row for row in rows}
    return {
        "contention_even_over_ideal": methods["even"]["over_ideal"],
        "contention_semi_over_ideal": methods["semi"]["over_ideal"],
        "contention_semi_over_ideal_after": methods["semi"]["over_ideal_after"],
        "contention_reaction_steps": methods["semi"]["reaction_steps"],
        "contention_recovery_steps": methods["semi"]["recovery_steps"],
        "contention_semi_loss_gap": methods["semi"]["loss_gap"],
        "contention_speedup": methods["even"]["step_ms"] / methods["semi"]["step_ms"],
    }


def _seeds(progress: Progress) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What leaving out half of one rank's work does to the loss, over seeds; always on CPU ranks."""
    from trimtab.bench.scenarios.straggler.resize_loss import STEPS, resize_loss

    rows = resize_loss(STEPS, SEEDS, progress)
    methods = {row["method"]: row for row in rows}
    return [{"setting": "seeds", **row} for row in rows], {
        "resize_priority_loss_gap": methods["resize-priority"]["gap"],
        "resize_random_loss_gap": methods["resize-random"]["gap"],
        "priority_better_seeds": methods["priority over random"]["better_seeds"],
        "priority_minus_random": methods["priority over random"]["gap"],
        "priority_minus_random_spread": methods["priority over random"]["spread"],
    }


def _overall(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The worst over the settings that were run."""
    semi = [row for row in rows if row.get("method") == "semi" and row.get("over_ideal") is not None]
    if not semi:
        return {}
    watching = [row["watching_over_step"] for row in semi if "watching_over_step" in row]
    figures: dict[str, Any] = {
        "semi_over_ideal": max(row["over_ideal"] for row in semi),
        "reaction_steps": max(row["reaction_steps"] for row in semi),
        "semi_loss_gap": max(row["loss_gap"] for row in semi),
    }
    return figures | ({"watching_over_step": max(watching)} if watching else {})


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace(" ", "")
