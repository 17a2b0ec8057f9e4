"""One way to measure: warm up, interleave, repeat, take the median, and show the noise; and what a bench returns.

Cases run in turn, round after round, so that a machine that slows down slows all of them. Every
bench measures its baseline twice under two names (the A/A row): a smaller difference than that
between those two is noise.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median, quantiles
from typing import Any

Progress = Callable[[int, int], None]
"""Called with (rounds done, rounds in all)."""

AA = " (again)"
"""Suffix of the second measurement of the same thing."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Repeated measurements of one case, in seconds."""

    samples: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return median(self.samples) * 1e3

    @property
    def spread(self) -> float:
        """Distance between the quartiles over the median."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / median(self.samples)

    @property
    def step(self) -> dict[str, float]:
        """The columns of a row of step times."""
        return {"step_ms": self.median_ms, "spread": self.spread}

    def ratio(self, other: Timing) -> float:
        """Median of the round-by-round ratios: what slows a whole round cancels out."""
        return median(a / b for a, b in zip(self.samples, other.samples, strict=True))


def interleave(
    cases: Mapping[str, Callable[[], float | None]],
    *,
    warmup: int,
    repeats: int,
    progress: Progress | None = None,
) -> dict[str, Timing]:
    """Measure the cases in turn, `repeats` rounds after `warmup` unmeasured ones.

    A case that returns a number has timed itself, in seconds; otherwise its wall time counts.
    """
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(warmup + repeats):
        for name, run in cases.items():
            start = time.perf_counter()
            own = run()
            seconds = time.perf_counter() - start if own is None else own
            if round_ >= warmup:
                samples[name].append(seconds)
        if progress is not None:
            progress(round_ + 1, warmup + repeats)
    return {name: Timing(samples=tuple(values)) for name, values in samples.items()}


def part(progress: Progress, index: int, count: int) -> Progress:
    """The progress of one of `count` jobs of the same length."""
    return lambda done, total: progress(index * total + done, count * total)


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
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")  # which changes what overlaps on a GPU
    given = [f"CUDA_DEVICE_MAX_CONNECTIONS={queues}"] if queues else []
    return " ".join(
        [*given, f"python benchmarks/studies/{program.name}" if study else "trimtab", *sys.argv[1:]]
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
