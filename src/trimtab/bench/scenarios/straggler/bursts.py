"""A rank that is slow for a few steps at a time: too short for units to move there and back.

Two equal ranks; the second has a quarter of its speed for a few steps, again and again. `own` may only move units,
`lease` only lend them, `semi` chooses. Every method pays for noticing, moving and going back: the figure is the mean
of all steps from the first burst on. On CPU the ranks are hosts with a link of their own, whose transfers take no
processor time that products could use; parts of a GPU have none, and NCCL's sockets take from both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from trimtab.bench.harness import Progress, part
from trimtab.bench.ranks import hosts, run_on_cluster
from trimtab.bench.scenarios.straggler.method import Method

METHODS = ("even", "own", "lease", "semi")
SIZES: dict[str, dict[str, int]] = {
    # So many tokens for each weight that products can hide what a step borrows, and not what a move takes.
    "cpu": {"width": 768, "heads": 16, "layers": 2, "batch": 6, "length": 64},
    "cuda": {"width": 4096, "heads": 32, "layers": 2, "batch": 8, "length": 512},
}
LINK = {"cpu": "2gbit", "cuda": None}
SLOW, CALM, ROUNDS, WARMUP = 6, 8, 3, 3
"""Steps of a burst and between two, number of bursts, and steps before the first."""

_SPEED = 0.25
_BALANCE: dict[str, Any] = {"window": 1, "patience": 1, "threshold": 1.5, "horizon": SLOW}


def bursts(device: str, progress: Progress) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each method, and how the others compare with the lease."""
    spec: dict[str, Any] = {
        **SIZES[device], "device": device, "model": "gpt", "speeds": [1.0, 1.0], "speed": _SPEED, "slow": SLOW,
        "calm": CALM, "rounds": ROUNDS, "balance": _BALANCE,
    }  # fmt: skip
    cluster = hosts(spec["speeds"], device, link=LINK[device])
    rows = run_on_cluster(cluster, on_rank, spec, part(progress, 0, 1))
    times = {row["method"]: row["step_ms"] for row in rows}
    semi = next(row for row in rows if row["method"] == "semi")
    return [{"setting": "bursts", **row} for row in rows], {
        "lease_over_even": times["lease"] / times["even"],
        "lease_over_own": times["lease"] / times["own"],
        "bursts_semi_over_best": times["semi"] / min(times.values()),
        "bursts_chosen": sorted({each["mode"] for each in semi["decisions"]} - {"home"}),
        "bursts_loss_gap": max(row["loss_gap"] for row in rows),
    }


def on_rank(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
    """All methods take each step in turn."""
    from trimtab.emulate.throttling.repeated_products import RepeatedProducts

    state: Any = SimpleNamespace(speed=1.0)
    _kept = RepeatedProducts(state, spec["device"])
    trainers = {method: Method(spec, method) for method in METHODS}
    period = spec["slow"] + spec["calm"]
    total = WARMUP + spec["rounds"] * period
    for step in range(total):
        slow = step >= WARMUP and (step - WARMUP) % period < spec["slow"] and dist.get_rank() == 1
        state.speed = spec["speed"] if slow else 1.0
        for trainer in trainers.values():
            trainer.step()
        report(step + 1, total)
    state.speed = 1.0
    return [_row(method, trainer, trainers["even"].losses) for method, trainer in trainers.items()]


def _row(method: str, trainer: Method, even: Sequence[float]) -> dict[str, Any]:
    seconds = trainer.seconds[WARMUP:]
    row: dict[str, Any] = {
        "method": method,
        "step_ms": sum(seconds) / len(seconds) * 1e3,
        "steps_ms": [round(each * 1e3, 1) for each in seconds],
        "loss_gap": max(abs(a - b) for a, b in zip(trainer.losses, even, strict=True)),
    }
    if method != "even":
        row["decisions"] = [
            {
                "step": record.step,
                "mode": record.decision.mode,
                "predicted_ms": record.decision.predicted * 1e3,
                "lent_ms": record.decision.lent * 1e3,
                "once_ms": record.decision.once * 1e3,
                "took_ms": record.took * 1e3,
            }
            for record in trainer.records()
        ]
    return row
