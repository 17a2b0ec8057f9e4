"""`trimtab bench straggler`: a tensor-parallel job with slow ranks, and what can be done about them.

Rows: `even`; `shares` by speeds measured before; `resize-random` and `resize-priority`, which leave out as much of
the slow rank's work as it is too slow for; `migrate`, which leases that work to the others in every step; `semi`, the
controller, exact; `semi-resize`, the controller allowed to leave out half; `ideal`, water-filling of the times that the
even run's ranks needed, plus its collectives without waits. All train the same model on the same data.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trimtab.bench.harness import AA, Timing, interleave
from trimtab.bench.ranks import run_on_ranks
from trimtab.bench.result import Result
from trimtab.bench.scenarios.straggler.link import links
from trimtab.bench.scenarios.straggler.models import SIZES
from trimtab.bench.scenarios.straggler.trainer import Trainer
from trimtab.bench.scenarios.tp import ideal
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trimtab.cluster import Cluster

STATIC: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "gpt-half": {"model": "gpt", "speeds": [1.0, 0.5]},
        "gpt-quarter": {"model": "gpt", "speeds": [1.0, 0.25]},
        "vit-half": {"model": "vit", "speeds": [1.0, 0.5]},
    },
    "cuda": {
        "gpt-half": {"model": "gpt", "speeds": [1.0, 0.5]},
        "gpt-quarter": {"model": "gpt", "speeds": [1.0, 0.25]},
        "gpt-two": {"model": "gpt", "speeds": [1.0, 1.0, 0.5, 0.5]},
        "vit-half": {"model": "vit", "speeds": [1.0, 0.5]},
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
"""Steps count as settled from where they stay within this many times their final length."""

ONLY = ("gpt-half", "gpt-quarter", "gpt-two", "vit-half", "contention", "links", "seeds")


def straggler(device: str, repeats: int, only: Sequence[str], progress: Callable[[int, int], None]) -> Result:
    """Every setting in a job of its own; what it found goes to standard error as it comes."""
    unknown = [name for name in only if name not in ONLY]
    if unknown:
        raise TrimtabError(f"bench straggler: there is no setting {unknown[0]!r}; choose {', '.join(ONLY)}")
    # What leaving work out does to the loss is measured on CPU ranks, whatever the device: on a GPU machine on demand.
    every = (*STATIC[device], "contention", "links", *(("seeds",) if device == "cpu" or only else ()))
    wanted = [name for name in every if not only or name in only]
    if not wanted:
        raise TrimtabError(
            f"bench straggler: {', '.join(only)} is not there on {device}; there are {', '.join(every)}"
        )
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"device": device}
    failed: list[TrimtabError] = []
    for index, name in enumerate(wanted):

        def moved(done: int, total: int, index: int = index) -> None:
            progress(index * total + done, len(wanted) * total)

        try:
            found, figures = _setting(name, device, repeats, moved)
        except TrimtabError as error:  # the other settings are worth having without it
            failed.append(error)
            summary[name] = f"not measured: {error}"
            continue
        for row in found:
            print(
                " ".join(f"{key}={_short(value)}" for key, value in row.items()), file=sys.stderr, flush=True
            )
        rows += found
        summary |= figures
    if failed and len(failed) == len(wanted):
        raise failed[0]
    return Result(bench="straggler", summary=summary | _overall(rows), rows=rows)


def _setting(
    name: str, device: str, repeats: int, progress: Callable[[int, int], None]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows and figures of one setting."""
    if name in STATIC[device]:
        rows = _static(name, device, repeats, progress)
        return rows, _static_figures(name, rows)
    if name == "contention":
        rows = _contention(device, progress)
        return rows, _contention_figures(rows)
    return links(device, progress) if name == "links" else _seeds(progress)


def _static(
    name: str, device: str, repeats: int, progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    from trimtab.emulate import Emulation

    spec = {**STATIC[device][name], **SIZES[device], "device": device, "repeats": repeats, "settle": SETTLE}
    with Emulation(_ranks(spec["speeds"], device), throttle="gemm") as emulation:
        rows: list[dict[str, Any]] = run_on_ranks(emulation, on_rank, spec, progress=progress)
    return [{"setting": name, **row} for row in rows]


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """All methods with ranks of fixed speeds: the first steps, then measured rounds, interleaved."""
    torch.set_num_threads(1)
    trainers = {method: Trainer(spec, method) for method in (*TRAINED, "even" + AA, "shares")}
    trainers["migrate"] = Trainer(spec, "migrate", leased=trainers["shares"].counts)
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
    timings["ideal"] = ideal(trainers["even"], spec["repeats"])  # type: ignore[arg-type]
    rows = []
    for method, timing in timings.items():
        row: dict[str, Any] = {
            "method": method,
            "step_ms": timing.median_ms,
            "spread": timing.spread,
            "over_ideal": timing.ratio(timings["ideal"]),
        }
        if method in trainers:
            row |= _trained(trainers[method], trainers["even"])
        if method.startswith("semi"):
            row |= _controlled(trainers[method], trainers["even"], timing)
        rows.append(row)
    return rows


def _trained(trainer: Trainer, even: Trainer) -> dict[str, Any]:
    gaps = [abs(a - b) for a, b in zip(trainer.losses[:50], even.losses[:50], strict=False)]
    return {
        "final_loss": trainer.losses[-1],
        "steps": len(trainer.losses),
        "loss_gap": max(gaps),
        "units": trainer.units,
    }


def _controlled(trainer: Trainer, even: Trainer, timing: Timing) -> dict[str, Any]:
    records = trainer.records()
    return {
        "reaction_steps": settled_after(_over(trainer.taken, even.taken), len(timing.samples)),
        "watching_over_step": trainer.watching() / median(timing.samples),
        "decisions": [_said(record) for record in records],
    }


def settled_after(taken: Sequence[float], late: int, *, run: int = 5) -> int:
    """The first step from which the median of the next few is near that of the `late` last ones."""
    final = median(taken[-late:])
    for step in range(len(taken) - run + 1):
        if median(taken[step : step + run]) <= NEAR * final:
            return step
    return len(taken)


def _over(taken: Sequence[float], even: Sequence[float]) -> list[float]:
    """Steps over those of the even run at the same time: what slows the whole machine cancels out."""
    return [a / b for a, b in zip(taken, even, strict=True)]


def _said(record: Any) -> dict[str, Any]:
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


def _contention(device: str, progress: Callable[[int, int], None]) -> list[dict[str, Any]]:
    from trimtab.emulate import Emulation

    spec: dict[str, Any] = {
        **SIZES[device],
        **CONTENTION,
        "model": "gpt",
        "speeds": [1.0, 1.0],
        "device": device,
    }
    with Emulation(_ranks(spec["speeds"], device)) as emulation:
        rows: list[dict[str, Any]] = run_on_ranks(emulation, follow_contention, spec, progress=progress)
    return [{"setting": "contention", **row} for row in rows]


def follow_contention(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """Two equal ranks, the second of which is slow for a while."""
    from types import SimpleNamespace

    from trimtab.emulate.throttling.repeated_products import RepeatedProducts

    torch.set_num_threads(1)
    state: Any = SimpleNamespace(speed=1.0)
    _kept = RepeatedProducts(state, spec["device"])
    trainers = {method: Trainer(spec, method) for method in CONTENDED}
    for step in range(spec["steps"]):
        slow = spec["start"] <= step < spec["end"] and dist.get_rank() == 1
        state.speed = spec["speed"] if slow else 1.0
        for trainer in trainers.values():
            trainer.step()
        report(step + 1, spec["steps"])
    state.speed = 1.0
    start, end, last = spec["start"], spec["end"], spec["steps"]
    late = 8  # steps at the end of a phase, when all has settled
    even = trainers["even"]
    floors = {}
    for phase, stop in (("during", end), ("after", last)):
        local_times = even.local_times
        even.local_times = local_times[:stop]
        floors[phase] = ideal(even, late)  # type: ignore[arg-type]
        even.local_times = local_times
    rows: list[dict[str, Any]] = []
    for method, trainer in trainers.items():
        during, after = trainer.taken[start:end], trainer.taken[end:]
        row: dict[str, Any] = {
            "method": method,
            "step_ms": sum(trainer.taken[start:]) / len(trainer.taken[start:]) * 1e3,
            "over_ideal": Timing(samples=tuple(during[-late:])).ratio(floors["during"]),
            "over_ideal_after": Timing(samples=tuple(after[-late:])).ratio(floors["after"]),
            **_trained(trainer, even),
        }
        if method != "even":
            row["reaction_steps"] = settled_after(_over(during, even.taken[start:end]), late)
            row["recovery_steps"] = settled_after(_over(after, even.taken[end:]), late)
            row["decisions"] = [_said(record) for record in trainer.records()]
        rows.append(row)
    return rows


def _static_figures(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = {row["method"]: row for row in rows}
    semi = found["semi"]
    return {
        f"{name}_even_over_ideal": found["even"]["over_ideal"],
        f"{name}_semi_over_ideal": semi["over_ideal"],
        f"{name}_reaction_steps": semi["reaction_steps"],
        f"{name}_semi_loss_gap": semi["loss_gap"],
        f"{name}_semi_resize_over_ideal": found["semi-resize"]["over_ideal"],
        f"{name}_aa_ratio": found["even" + AA]["step_ms"] / found["even"]["step_ms"],
    }


def _contention_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = {row["method"]: row for row in rows}
    return {
        "contention_even_over_ideal": found["even"]["over_ideal"],
        "contention_semi_over_ideal": found["semi"]["over_ideal"],
        "contention_semi_over_ideal_after": found["semi"]["over_ideal_after"],
        "contention_reaction_steps": found["semi"]["reaction_steps"],
        "contention_recovery_steps": found["semi"]["recovery_steps"],
        "contention_semi_loss_gap": found["semi"]["loss_gap"],
        "contention_speedup": found["even"]["step_ms"] / found["semi"]["step_ms"],
    }


def _seeds(progress: Callable[[int, int], None]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What leaving half of one rank's work out does to the loss, over seeds; on CPU ranks, whatever the device."""
    from trimtab.bench.scenarios.straggler.resize_loss import STEPS, resize_loss

    rows = resize_loss(STEPS, SEEDS, progress)
    found = {row["method"]: row for row in rows}
    return [{"setting": "seeds", **row} for row in rows], {
        "resize_priority_loss_gap": found["resize-priority"]["gap"],
        "resize_random_loss_gap": found["resize-random"]["gap"],
        "priority_better_seeds": found["priority over random"]["better_seeds"],
        "priority_minus_random": found["priority over random"]["gap"],
        "priority_minus_random_spread": found["priority over random"]["spread"],
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


def _ranks(speeds: Sequence[float], device: str) -> Cluster:
    """A host of one rank for each speed."""
    from trimtab.cluster import Cluster, Device, Host

    kind: Any = device
    classes = {f"d{i}": Device(kind=kind, speed=speed) for i, speed in enumerate(speeds)}
    hosts = tuple(Host(name="abcd"[i], devices={f"d{i}": 1}) for i in range(len(speeds)))
    return Cluster(version=1, devices=classes, hosts=hosts)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace(" ", "")
