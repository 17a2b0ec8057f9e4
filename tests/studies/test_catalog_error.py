"""The study of datasheet estimates: its rows, from measurements whose answer is known."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.studies.catalog_error import rows_of, summary

LINEAR, NORM = "linear|1000x1000x1000|bf16|bf16", "norm|aten.native_layer_norm.default,4x8|bf16|bf16"


def part(slower: float, memory_slower: float) -> dict[str, Any]:
    """An H200 that is this many times slower in arithmetic and in memory."""

    def time(seconds: float) -> dict[str, float]:
        return {"forward_s": seconds, "backward_s": 2 * seconds}

    profile = {
        "called": "NVIDIA H200",
        "operators": {LINEAR: time(1e-3 * slower), NORM: time(1e-4 * memory_slower)},
        "batches": {"Gpt": [8, 16]},
        "optimiser": {"a": 1e-11 * memory_slower, "c": 0.0},
    }
    model = {
        "profile": profile,
        "keys": [LINEAR, NORM, NORM],
        "elements": 1000,
        "samples": 16,
        "unfinished": 0,
    }
    return {"called": "NVIDIA H200", "models": {"gpt2": model}}


def test_parts_that_keep_to_their_datasheets_have_no_error() -> None:
    rows = rows_of("cuda", [(1.0, part(1.0, 1.0)), (0.5, part(2.0, 1.0)), (0.25, part(4.0, 1.0))])
    assert len(rows) == 3 * 3 * 2 * 2
    exact = [row for row in rows if (row["how"], row["bandwidth"]) == ("datasheets", "whole")]
    assert all(row["error"] == pytest.approx(0, abs=1e-9) for row in exact)
    best = {(row["how"], row["bandwidth"]): row["mean_error"] for row in summary(rows)}
    assert best["datasheets", "whole"] < best["datasheets", "in proportion"]
    assert set(best) == {(h, b) for h in ("datasheets", "derived") for b in ("whole", "in proportion")}
