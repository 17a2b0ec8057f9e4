"""The bench of precision, with sizes that take no time: its rows, its summary, and what it restores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trimtab.bench.scenarios import precision as bench
from trimtab.precision.devices import offers

if TYPE_CHECKING:
    import pytest


def test_rows_for_every_operator_precision_and_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LINEAR", {"cpu": ("16x128x128",)})
    small = {"width": 32, "layers": 1, "heads": 2, "context": 16, "sequences": 2}
    monkeypatch.setattr(bench, "STEP", {"cpu": small})
    threads = torch.get_num_threads()
    seen: list[tuple[int, int]] = []
    result = bench.precision("cpu", 2, lambda done, total: seen.append((done, total)))
    assert torch.get_num_threads() == threads
    assert seen[-1][0] <= seen[-1][1]
    offered = offers(torch.device("cpu"))
    for kind, names in offered.items():
        rows = [row for row in result.rows if row["operator"] == kind]
        # The convolution is too narrow for int8 to pay.
        slower = {"int8"} if kind == "conv" else set()
        assert {row["precision"] for row in rows} == {*names, "fp32 (again)"} - slower
        assert {row["pass"] for row in rows} == {"forward", "forward+backward"}
    saved = {row["precision"]: row["saved_bytes_ratio"] for row in result.rows if row["operator"] == "linear"}
    assert saved["fp32"] == 1
    assert saved["bf16"] == 0.5
    if "int8" in offered["linear"]:
        assert saved["int8"] < 0.3
        changes = {"int8_loss_change", "int8_first_loss_change", "aa_loss_change"}
        assert {"int8_linear_speedup", "int8_step_speedup", *changes} <= set(result.summary)
    steps = [row for row in result.rows if row["operator"] == "step"]
    assert all(row["loss"] < 6 for row in steps)
    assert result.summary["aa_worst"] >= 0  # type: ignore[operator]
