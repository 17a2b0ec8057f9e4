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
    alone = [{"steps": [{"time": pace * k} for k in range(12)], "held_out": 0.0} for pace in (1.0, 2.0)]
    return {**made, IDEAL: alone}


def events() -> dict[str, list[dict[str, Any]]]:
    moved = [{"what": "shares", "step": 2, "after": [10, 6]}]
    return {method: moved if method in (RUN, AUTO) else [] for method in METHODS}


def test_rows_and_summary() -> None:
    judged = {row["method"]: row for row in rows.judged("ddp", records(), events(), batch=8, ranks=2)}
    assert judged.keys() == METHODS.keys()
    assert judged[TORCHRUN]["samples_per_s"] == pytest.approx(4.0)
    assert judged[IDEAL]["samples_per_s"] == pytest.approx(8.0 + 4.0), (
        "the rates of both, each with its batch"
    )
    assert judged[RUN]["over_torchrun"] == pytest.approx(2.5)
    assert judged[RUN]["fraction_of_ideal"] == pytest.approx(10 / 12)
    assert judged[RUN]["loss_as_good"]
    assert not judged[CANARY]["loss_as_good"]
    assert judged[RUN]["shares"] == "10/6"
    assert (judged[RUN]["last_change_step"], judged[BITS]["last_change_step"]) == (2, 0)
    assert judged[RUN]["start_cost_s"] == pytest.approx(6 * (10 - 1.6)), (
        "six steps of 10 s before the timed ones"
    )
    figures = rows.figures("ddp", judged)
    assert figures["ddp_run_over_bits"] == pytest.approx(1.25)
    assert figures["ddp_auto_over_run"] == pytest.approx(1.6 / 1.5)
    assert figures["ddp_losses_as_good"]
    assert figures["ddp_canary_flagged"]


def test_speeds_alone() -> None:
    few = {method: logs for method, logs in records().items() if method not in (AGAIN, CANARY)}
    judged = {row["method"]: row for row in rows.judged("ddp", few, events(), batch=8, ranks=2)}
    assert judged[RUN]["loss_as_good"] is None
    assert rows.figures("ddp", judged).keys() == {
        *("ddp_run_over_torchrun", "ddp_run_over_bits", "ddp_run_fraction_of_ideal", "ddp_auto_over_run")
    }


def test_what_follows_the_last_change_is_timed() -> None:
    ends = [0.0, *(2.0 * k for k in range(1, 13)), *(24 + 1.0 * k for k in range(1, 8))]
    of_steps = {"steps": [{"time": end} for end in ends]}  # 12 steps of 2 s, then 7 of 1 s
    assert rows.steady(of_steps) == pytest.approx((1.0, 13 * 2.0 - 1 - 13.0))
    assert rows.steady(of_steps, last_change=13)[0] == 1.0
    assert rows.steady(of_steps, last_change=99)[0] == 1.0, "at least the last three"
    assert rows.steady({"steps": of_steps["steps"][:13]}) == pytest.approx((2.0, 0.0))


def test_ranks_alone_are_timed_while_both_train() -> None:
    fast, slow = ({"steps": [{"time": pace * k} for k in range(8)]} for pace in (1.0, 2.0))
    assert [len(log["steps"]) for log in rows.together([fast, slow])] == [8, 4]
    late = {"steps": [{"time": 5.0 + k} for k in range(8)]}
    assert [len(log["steps"]) for log in rows.together([fast, late])] == [8, 8], "too few steps in common"


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
        {"what": "compress", "expected": None, "step": 0},
        {"what": "shares", "after": [10, 6], "step": 7},
        {"what": "plan", "expected": {"measuring_s": 2.0, "plan_applied_s": 30.0, "step_s": 1.0}, "step": 12},
        {"what": "shares", "after": [11, 5], "step": 14},
        {"what": "bits", "step": 19},
    ]
    assert rows.settled(moved) == 14
    assert rows.settled([]) == 0
    assert rows.last_shares(moved) == "11/5"
    assert rows.last_shares(moved[:1]) == "even"
    assert rows.plan_cost(moved) == {"measuring_s": 2.0, "plan_applied_s": 30.0}
    assert rows.plan_cost([]) == {}
