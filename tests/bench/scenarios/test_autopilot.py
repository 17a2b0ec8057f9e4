"""`trimtab bench autopilot`: what its rows say, from records of the scripts."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from trimtab.bench.scenarios.autopilot import rows
from trimtab.bench.scenarios.autopilot.rows import AGAIN, AUTO, BITS, CANARY, IDEAL, METHODS, RUN, TORCHRUN
from trimtab.errors import TrimtabError


def record(seconds: float, loss: float) -> dict[str, Any]:
    """Ten steps, of which the first are slower."""
    times = [10.0 * step for step in range(7)]
    return {
        "steps": [{"time": t} for t in [*times, *(60 + seconds * k for k in (1, 2, 3))]],
        "held_out": loss,
    }


def records() -> dict[str, list[dict[str, Any]]]:
    steps = {TORCHRUN: 4.0, AGAIN: 4.2, BITS: 2.0, RUN: 1.6, AUTO: 1.5, CANARY: 2.0}
    losses = {TORCHRUN: 3.0, AGAIN: 3.05, BITS: 3.01, RUN: 3.08, AUTO: 2.9, CANARY: 3.5}
    made = {method: [record(steps[method], losses[method])] for method in steps}
    return {**made, IDEAL: [record(1.0, 0.0), record(2.0, 0.0)]}


def test_rows_and_summary() -> None:
    judged = {row["method"]: row for row in rows.judged("ddp", records(), batch=8, ranks=2)}
    assert judged.keys() == METHODS.keys()
    assert judged[TORCHRUN]["samples_per_s"] == pytest.approx(4.0)
    assert judged[IDEAL]["samples_per_s"] == pytest.approx(8.0 + 4.0), (
        "the rates of both, each with its batch"
    )
    assert judged[RUN]["over_torchrun"] == pytest.approx(2.5)
    assert judged[RUN]["fraction_of_ideal"] == pytest.approx(10 / 12)
    assert judged[RUN]["loss_as_good"]
    assert not judged[CANARY]["loss_as_good"]
    figures = rows.figures("ddp", judged)
    assert figures["ddp_run_over_bits"] == pytest.approx(1.25)
    assert figures["ddp_auto_over_run"] == pytest.approx(1.6 / 1.5)
    assert figures["ddp_losses_as_good"]
    assert figures["ddp_canary_flagged"]


def test_launches() -> None:
    assert rows.launched(TORCHRUN, "boot") == rows.launched(AGAIN, "boot") == []
    assert rows.launched(RUN, "boot") == ["-m", "boot"]
    assert rows.launched(AUTO, "boot")[:3] == ["-m", "boot", "--settings"]
    assert rows.launched(IDEAL, "boot")[-1] == "alone"


def test_unknown_scripts_are_named() -> None:
    with pytest.raises(TrimtabError, match="no script 'keras'; there are ddp, trainer, lightning"):
        rows.autopilot("cpu", 4, ["keras"], (64, 1, 4), "", lambda _done, _total: None)


def test_no_script_knows_trimtab() -> None:
    scripts = [Path(rows.__file__).parent / "scripts" / name for name in rows.SCRIPTS.values()]
    for script in scripts:
        imported = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(script.read_text()))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert "torch" in imported
        assert "trimtab" not in imported


def test_what_a_run_decided() -> None:
    moved: list[dict[str, Any]] = [
        {"what": "compress", "expected": None},
        {"what": "shares", "after": [10, 6]},
        {"what": "plan", "expected": {"measuring_s": 2.0, "plan_applied_s": 30.0, "step_s": 1.0}},
        {"what": "shares", "after": [11, 5]},
    ]
    assert rows.last_shares(moved) == "11/5"
    assert rows.last_shares(moved[:1]) == "even"
    assert rows.plan_cost(moved) == {"measuring_s": 2.0, "plan_applied_s": 30.0}
    assert rows.plan_cost([]) == {}
