"""The model of `trimtab bench tp`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trimtab.models import tasks

SIZES: dict[str, dict[str, int]] = {
    "cpu": {"width": 512, "heads": 16, "layers": 3, "batch": 4, "length": 128},
    # Wide and short: over sockets an all-reduce must not hide the products.
    "cuda": {"width": 6144, "heads": 48, "layers": 2, "batch": 4, "length": 512},
}


def task(spec: Mapping[str, Any]) -> tasks.Task:
    """The model of the bench, and its text."""
    size = {name: spec[name] for name in ("width", "layers", "heads")}
    return tasks.gpt(
        **size, context=spec["length"], samples=spec["batch"], device=torch.device(spec["device"])
    )
