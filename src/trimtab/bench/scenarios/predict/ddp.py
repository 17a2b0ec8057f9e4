"""Data-parallel plans: batch shares, precisions and bits on two unequal ranks.

Probed are single steps without communication, in one precision throughout and at three batch sizes, the link, and the
codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from trimtab.bench.harness import Progress, part
from trimtab.bench.ranks import run_on_cluster
from trimtab.bench.scenarios.predict.ranks import on_rank, two_hosts
from trimtab.bench.scenarios.predict.rows import row

MODELS = {"cpu": ("gpt", "conv", "bert"), "cuda": ("gpt", "gpt2", "vit")}
LINKS = {"cpu": ("300mbit", "1gbit"), "cuda": ("none",)}


class HeldOutPlan(NamedTuple):
    """What the two ranks do."""

    shares: tuple[int, int]
    """Units of samples."""

    low: str
    """Which operators of the slow rank are in low precision: `none`, `all`, or every second or third."""

    bits: int | None
    layers: str = "alike"
    """Bits of the layers: `alike`, `mixed` (some in 8 bits, some uncompressed), or in `short` blocks."""

    accumulate: int = 1
    route: str = "flat"
    """`flat`, or in `two levels` where hosts have several ranks."""

    def __str__(self) -> str:
        words = [f"{self.shares[0]}/{self.shares[1]}", f"low {self.low}", f"{self.bits or 'fp32'} bits"]
        words += [self.layers] * (self.layers != "alike") + [self.route] * (self.route != "flat")
        return ", ".join(words + [f"{self.accumulate} micro-batches"] * (self.accumulate > 1))


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


def ddp_rows(device: str, rounds: int, progress: Progress) -> list[dict[str, Any]]:
    """Every model over every link."""
    models, links = MODELS[device], LINKS[device]
    rows: list[dict[str, Any]] = []
    for index, link in enumerate(links):
        rows += predict_jobs(device, models, link, PLANS[link], rounds, part(progress, index, len(links)))
    return rows


def predict_jobs(
    device: str,
    models: Sequence[str],
    link: str,
    plans: Sequence[HeldOutPlan],
    rounds: int,
    progress: Progress | None = None,
    *,
    per_host: int = 1,
) -> list[dict[str, Any]]:
    """A row for each plan of each model; one emulated cluster trains the models one after another."""
    spec = {
        "device": device,
        "models": list(models),
        "link": link,
        "plans": list(plans),
        "rounds": rounds,
        "per_host": per_host,
    }
    measured = run_on_cluster(two_hosts(device, link, per_host), on_rank, spec, progress)
    return [
        {"model": model, "link": link, **row(plan, of_plan)}
        for model, of_model in zip(models, measured, strict=True)
        for plan, of_plan in zip(plans, of_model, strict=True)
    ]
