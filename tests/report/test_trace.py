"""Traces of measured steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.report.run_cases import STARTED, start, two_ranks, write_rank

from trimtab.errors import TrimtabError
from trimtab.report.run_folder import load_run
from trimtab.report.trace import traced_steps, write_trace

SPANS = [
    ["compute", "forward", 0.0, 0.02],
    ["compute", "backward", 0.02, 0.05],
    ["codec", "bucket 0, stage 0", 0.03, 0.035],
    ["wire", "bucket 0, stage 0", 0.035, 0.06],
    ["wait", "wait for averages", 0.05, 0.06],
    ["strange", 7, "a", None],
]
PLAN = {
    "predicted": {"step_s": 0.08},
    "ranks": [["fast", 1], ["slow", 1]],
    "roles": {"fast": {"compute_s": 0.05, "after_s": 0.01}, "slow": {"compute_s": 0.07}},
}


def traced(folder: Path, plan: object = PLAN) -> Path:
    for rank in range(2):
        spans = {"kind": "trace", "began": STARTED + 0.001 * rank, "spans": SPANS}
        events = [{"time": STARTED + step, "step": step, **spans} for step in (5, 100)]
        in_force = [{"time": STARTED, "kind": "plan", "step": 0, "plan": plan}] if rank == 0 else []
        write_rank(folder, rank, [start(rank), *in_force, *events])
    return folder


def test_a_step_is_traced_on_all_ranks_with_its_prediction_beside(tmp_path: Path) -> None:
    run = load_run(traced(tmp_path))
    assert traced_steps(run) == [5, 100]
    path = tmp_path / "step120.json"
    assert write_trace(run, path) == 100, "the one nearest to the file's name"
    assert write_trace(run, tmp_path / "x.json", step=7) == 5
    tree = json.loads(path.read_text())
    spans = [event for event in tree["traceEvents"] if event["ph"] == "X"]
    backward = {event["pid"]: event for event in spans if event["name"] == "backward"}
    assert backward[0]["ts"] == pytest.approx(20_000)
    assert backward[1]["ts"] == pytest.approx(21_000, abs=1), "rank 1 began a millisecond later"
    assert backward[0]["dur"] == pytest.approx(30_000)
    names = {event["args"]["name"] for event in tree["traceEvents"] if event["name"] == "process_name"}
    assert names == {"rank 0 (a)", "rank 1 (a)", "rank 0, predicted", "rank 1, predicted"}
    predicted = [event for event in spans if event["pid"] == 10_001]
    assert max(event["ts"] + event["dur"] for event in predicted) == pytest.approx(81_000, abs=1)


@pytest.mark.parametrize(
    "plan", [None, 3, {"ranks": 7}, {"predicted": {"step_s": "x"}, "ranks": [], "roles": {}}]
)
def test_a_strange_plan_is_left_out(tmp_path: Path, plan: object) -> None:
    run = load_run(traced(tmp_path, plan))
    write_trace(run, tmp_path / "trace.json")
    assert "predicted" not in (tmp_path / "trace.json").read_text()


def test_a_run_without_traced_steps_says_so(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="no step is traced"):
        write_trace(load_run(two_ranks(tmp_path)), tmp_path / "x.json")
