"""The figures of the adaptive bench are read from the right rows."""

from __future__ import annotations

from typing import Any

from trimtab.bench.scenarios.adaptive import DEFAULT, METHODS, TRAINED, UNIFORM, _summary
from trimtab.bench.scenarios.loss import CANARY
from trimtab.planning.compression.family import SGD


def test_the_summary_takes_the_cheapest_uniform_setting_that_is_not_worse() -> None:
    sizes = dict.fromkeys(METHODS, 4.0) | {"uniform 3": 3.0, "uniform 2": 2.0, "uniform 2, feedback": 2.5}
    rows: list[dict[str, Any]] = [
        {
            "optimiser": optimizer,
            "method": method,
            "worse": method in ("uniform 2", CANARY),
            "gap": 0.0,
            "wire_mb": size,
            "wire_mb_at_end": size,
        }
        for optimizer, default in DEFAULT.items()
        for method, size in {**sizes, default: 2.0 if optimizer == SGD else 3.0}.items()
        if method in TRAINED[optimizer]
    ]
    summary = _summary(rows)
    assert summary["canary_flagged"]
    assert summary["adamw_canary_flagged"]
    assert not summary["default_worse"]
    assert summary["cheapest_uniform_not_worse"] == "uniform 2, feedback"
    assert summary["default_bytes_over_cheapest_uniform"] == 0.8
    assert summary["default_bytes_over_uniform4"] == 0.5
    assert summary["adamw_default_bytes_over_uniform4"] == 0.75
    for row in rows:
        row["worse"] = row["method"] in UNIFORM
    assert _summary(rows)["cheapest_uniform_not_worse"] == "none"
