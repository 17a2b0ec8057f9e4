"""Data-parallel plans that exchange gradients in other ways: routes, bits per layer, after several micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.bench.harness import Progress
from trimtab.bench.scenarios.predict.ddp import HeldOutPlan, predict_jobs

LINK = {"cpu": "300mbit", "cuda": "none"}
MODELS = {"cpu": ("gpt", "conv"), "cuda": ("gpt", "vit")}

ROUTES = (
    HeldOutPlan((5, 3), "none", 4),
    HeldOutPlan((5, 3), "none", 4, route="two levels"),
    HeldOutPlan((3, 5), "none", 8, route="two levels"),
    HeldOutPlan((5, 3), "none", None),
)
ADAPTIVE = (
    HeldOutPlan((5, 3), "none", 4, layers="mixed"),
    HeldOutPlan((4, 4), "half", 4, layers="mixed"),
    HeldOutPlan((5, 3), "third", 3, layers="short"),
)
ACCUMULATE = (
    HeldOutPlan((4, 4), "half", None, accumulate=2),
    HeldOutPlan((4, 4), "third", 4, accumulate=2),
    HeldOutPlan((5, 3), "none", 4, accumulate=2),
)


def route_rows(device: str, rounds: int, progress: Progress) -> list[dict[str, Any]]:
    """Four ranks on two hosts, flat and in two levels; ranks of a host exchange through shared memory."""
    return predict_jobs(device, ("gpt",), LINK[device], ROUTES, rounds, progress, per_host=2)


def adaptive_rows(device: str, rounds: int, progress: Progress) -> list[dict[str, Any]]:
    """Layers in unlike bits, and the bits and blocks that adaptive bits start with."""
    return _rows(device, ADAPTIVE, rounds, progress)


def accumulate_rows(device: str, rounds: int, progress: Progress) -> list[dict[str, Any]]:
    """Gradients of several micro-batches, exchanged after the last."""
    return _rows(device, ACCUMULATE, rounds, progress)


def _rows(device: str, plans: Sequence[HeldOutPlan], rounds: int, progress: Progress) -> list[dict[str, Any]]:
    return predict_jobs(device, MODELS[device], LINK[device], plans, rounds, progress)
