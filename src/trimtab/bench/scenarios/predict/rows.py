"""A row of `trimtab bench predict`, from what was predicted and measured in every round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any


def row(plan: object, rounds: Mapping[str, Any]) -> dict[str, Any]:
    """One held-out plan.

    Args:
        plan: shown as its name.
        rounds: seconds by round: "predicted", "measured", "again" (measured once more), and "naive" (a simpler
            prediction) and "memory" (predicted over allocated bytes of each rank) where known; and "bottleneck".
    """
    measured, again = rounds["measured"], rounds["again"]
    both = [mean(pair) for pair in zip(measured, again, strict=True)]

    def error(predicted: Sequence[float]) -> float:
        return float(median(p / m for p, m in zip(predicted, both, strict=True))) - 1

    return {
        "plan": str(plan),
        "predicted_ms": median(rounds["predicted"]) * 1e3,
        "measured_ms": median(both) * 1e3,
        "error": error(rounds["predicted"]),
        **({"naive_error": error(rounds["naive"])} if "naive" in rounds else {}),
        "repeat_error": median(a / b for a, b in zip(again, measured, strict=True)) - 1,
        **({"memory_error": max((r - 1 for r in rounds["memory"]), key=abs)} if "memory" in rounds else {}),
        "bottleneck": rounds["bottleneck"],
    }
