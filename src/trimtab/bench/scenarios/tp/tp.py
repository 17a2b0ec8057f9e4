"""`trimtab bench tp`: tensor-parallel training with a slow rank, and compared with torch's own on equal ranks.

Rows: `even` shares, `shares` by measured speed, `ideal` (the best split of the times that the ranks of the even run
needed, plus the time of its collectives when nobody waits); `torch` is `parallelize_module` on equal ranks. Rows `2d`
are of two tensor groups (`replicas`), rows `vocab` and `sequence` of a divided
vocabulary and of activations divided along the sequence (`memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from trimtab.bench.harness import AA, Progress, Result, interleave, part
from trimtab.bench.ranks import hosts, run_on_cluster
from trimtab.bench.scenarios.tp.by_torch import adamw, by_torch
from trimtab.bench.scenarios.tp.families import EXACT, family_gaps
from trimtab.bench.scenarios.tp.memory import memory_rows, memory_summary
from trimtab.bench.scenarios.tp.replicas import replica_rows, replica_summary
from trimtab.bench.scenarios.tp.task import SIZES, task
from trimtab.bench.trainer import TensorTrainer, Trainer, ideal
from trimtab.measure.timing import slowest_seconds
from trimtab.sharding import assignment, assignment_for, move

_MOVED = 0.1
"""Fraction of the units that change their rank in the row `move`."""


def tp(speed: Sequence[float], device: str, repeats: int, progress: Progress) -> Result:
    """Two ranks, the second at each speed in turn and at 1."""
    every = [*speed, 1.0]
    rows: list[dict[str, Any]] = []
    jobs = len(every) + 3
    for index, each in enumerate(every):
        rows += run_at(each, device, repeats, part(progress, index, jobs))
    spec = {"speed": max(speed), "device": device, "repeats": repeats, **SIZES[device]}
    in_replicas = replica_rows(spec, part(progress, jobs - 3, jobs))
    divided = {
        what: memory_rows(spec, what, part(progress, jobs - 2 + index, jobs))
        for index, what in enumerate(("vocab", "sequence"))
    }
    by_key = {(row["method"], row["speed"]): row for row in rows}
    summary: dict[str, Any] = {"device": device}
    for each in speed:
        even, shares = by_key["even", each], by_key["shares", each]
        summary[f"shares_over_ideal_at_{each:g}"] = shares["over_ideal"]
        summary[f"even_over_ideal_at_{each:g}"] = even["over_ideal"]
        summary[f"speedup_at_{each:g}"] = even["step_ms"] / shares["step_ms"]
    summary["even_over_torch"] = by_key["even", 1.0]["over_torch"]
    summary["aa_ratio"] = by_key["torch" + AA, 1.0]["over_torch"]
    summary["move_in_steps"] = by_key["move", 1.0]["step_ms"] / by_key["even", 1.0]["step_ms"]
    summary |= replica_summary(in_replicas) | families()
    for of_memory in divided.values():
        summary |= memory_summary(of_memory)
        rows += of_memory
    return Result(bench="tp", summary=summary, rows=[*rows, *in_replicas])


def families() -> dict[str, Any]:
    """The number of families that train exactly as on a single device, and the largest difference of all."""
    if find_spec("transformers") is None:
        return {"families": None, "families_gap": None}
    gaps: dict[str, float] = run_on_cluster(hosts((1.0, 1.0), "cpu"), family_gaps, {})
    return {"families": sum(gap < EXACT for gap in gaps.values()), "families_gap": max(gaps.values())}


def run_at(speed: float, device: str, repeats: int, progress: Progress) -> list[dict[str, Any]]:
    """The rows at one speed of the second rank: on CPU matrix products are repeated, a GPU is divided."""
    spec = {"speed": speed, "device": device, "repeats": repeats, **SIZES[device]}
    rows: list[dict[str, Any]] = run_on_cluster(
        hosts((1.0, speed), device), on_rank, spec, progress, throttle="gemm"
    )
    return rows


def on_rank(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
    """All methods at one speed of the second rank, interleaved."""
    equal = spec["speed"] == 1
    even, again = (TensorTrainer(task(spec), clock=True, optimizer=adamw) for _ in range(2))
    trainers: dict[str, Trainer] = {"even": even, "even" + AA: again}
    if equal:
        trainers |= {"torch": by_torch(task(spec)), "torch" + AA: by_torch(task(spec))}
    else:
        trainers["shares"] = TensorTrainer(task(spec), shares="measured", clock=True, optimizer=adamw)
    cases: dict[str, Callable[[], float]] = {method: trainer.step for method, trainer in trainers.items()}
    if equal:
        cases["move"] = lambda: _move(again)
    timings = interleave(cases, warmup=3, repeats=spec["repeats"], progress=report)
    timings["ideal"] = ideal(even.local_times[-spec["repeats"] :], even.device)
    rows = []
    for method, timing in timings.items():
        trainer = trainers.get(method)
        rows.append(
            {
                "method": method,
                "speed": spec["speed"],
                **timing.step,
                "over_ideal": timing.ratio(timings["ideal"]) if method != "move" else None,
                "over_torch": timing.ratio(timings["torch"]) if equal and trainer is not None else None,
                "units": trainer.units if isinstance(trainer, TensorTrainer) else None,
                "loss": trainer.loss if trainer is not None else None,
            }
        )
    return rows


def _move(trainer: TensorTrainer) -> float:
    """Move a tenth of all units and back; returns the seconds of the way there."""
    here = assignment(trainer.model)
    counts = {}
    for name, (first, second) in here.items():
        moving = max(1, round((len(first) + len(second)) * _MOVED))
        counts[name] = [len(first) - moving, len(second) + moving]
    there = assignment_for(trainer.model, counts)
    seconds = slowest_seconds(lambda: move(trainer.model, trainer.optimizer, there), trainer.device)
    move(trainer.model, trainer.optimizer, here)
    return seconds
