"""The result of a bench: a summary, rows, and where it was measured."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run of one bench."""

    bench: str
    summary: dict[str, float | bool | str]
    rows: list[dict[str, Any]]
    environment: dict[str, Any] = field(default_factory=lambda: environment())

    def to_json(self) -> str:
        return json.dumps(_rounded(asdict(self)), indent=2)


def environment() -> dict[str, Any]:
    """Machine, versions, date and command, so that a figure can be reproduced."""
    import torch

    import trimtab
    from trimtab.measure.device import called

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": _command(),
        "cpu": called(torch.device("cpu")),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "trimtab": trimtab.__version__,
    }


def _command() -> str:
    program = Path(sys.argv[0])
    study = program.parent.name == "studies"
    return " ".join([f"python benchmarks/studies/{program.name}" if study else "trimtab", *sys.argv[1:]])


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
