"""Reading run folders: one clock, who waited for whom, and folders that are broken in every way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.report.run_cases import STARTED, sample, start, two_ranks, write_rank

from trimtab.errors import TrimtabError
from trimtab.report.run_folder import latest_run, load_run
from trimtab.report.run_info import new_run_folder, run_name, write_run_info


def test_a_rank_waits_for_the_last_one(tmp_path: Path) -> None:
    run = load_run(two_ranks(tmp_path))
    first, second = run.steps[0][3], run.steps[1][3]
    assert (first["waits_for"], second["waits_for"]) == (1, None)
    assert first["waiting"] == pytest.approx(0.03)
    assert second["waiting"] == 0
    for step in (first, second):
        parts = ("data", "compute", "codec", "wire", "waiting", "optimizer")
        assert sum(step[name] for name in parts) == pytest.approx(step["seconds"])
    assert run.ended
    assert run.world_size == 2


def test_ranks_of_a_sharded_model_wait_for_the_one_that_waits_least(tmp_path: Path) -> None:
    for rank, wire in enumerate((0.03, 0.012, 0.02)):
        write_rank(
            tmp_path, rank, [start(rank), sample(1, ready=None, wire=wire), sample(2, ready=None, wire=0.0)]
        )
    run = load_run(tmp_path)
    first, second = zip(*run.steps.values(), strict=True)
    assert [step["waits_for"] for step in first] == [1, None, 1]
    assert [step["waiting"] for step in first] == pytest.approx([0.018, 0, 0.008])
    assert [step["wire"] for step in first] == pytest.approx([0.012] * 3)
    assert [step["waits_for"] for step in second] == [None] * 3


def test_emulated_hosts_have_the_clock_of_their_machine(tmp_path: Path) -> None:
    for rank, host in enumerate("ab"):
        samples = [sample(step, rank, clock=7.5 * rank) for step in (1, 2)]
        write_rank(tmp_path, rank, [{**start(rank, host), "machine": "vm"}, *samples])
    assert load_run(tmp_path).ranks[1].offset_s == 0.0


@pytest.mark.parametrize(("host", "offset"), [("b", 7.5), ("a", 0.0)])
def test_ranks_of_other_hosts_are_put_on_one_clock(tmp_path: Path, host: str, offset: float) -> None:
    run = load_run(two_ranks(tmp_path, clock=7.5, host=host))
    assert run.ranks[1].offset_s == pytest.approx(offset, abs=1e-5)
    if host == "b":
        assert run.steps[0][0]["waiting"] == pytest.approx(0.03, abs=1e-5)
        assert run.steps[1][0]["exchanged"] == pytest.approx(run.steps[0][0]["exchanged"], abs=1e-5)


def test_what_a_decision_brought(tmp_path: Path) -> None:
    decision = {"time": STARTED + 0.6, "kind": "decision", "step": 6, "what": "shares", "decided": "24/8"}
    folder = two_ranks(tmp_path, decision)
    later = [sample(step, seconds=0.05 if step > 6 else 0.1) for step in range(1, 13)]
    write_rank(folder, 0, [start(0), *later, decision])
    run = load_run(folder)
    (event,) = run.events("decision")
    assert run.brought(event) == (0.1, 0.05)
    assert run.brought({**event, "step": 12}) is None, "nothing is known of the time after it"
    assert not run.ended, "rank 0 wrote no end"


HOSTILE = [
    "",
    "{",
    "null",
    "[1, 2]",
    '{"kind": "step"}',
    '{"kind": 3, "time": 1}',
    '{"kind": "step", "time": NaN, "step": 1, "steps": 1, "seconds": 1}',
    '{"kind": "step", "time": 1, "step": -4, "steps": 1, "seconds": 1}',
    '{"kind": "step", "time": 1, "step": 1, "steps": true, "seconds": 1}',
    '{"kind": "step", "time": 1, "step": 1e999, "steps": 1, "seconds": 1}',
    '{"kind": "step", "time": 1, "step": 1' + "0" * 400 + ', "steps": 1, "seconds": 1}',
    '{"kind": "x", "time": 1' + "0" * 400 + "}",
    "[" * 100_000,
    "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
]


def test_broken_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    strange = sample(2, loss="<script>", wire="much", memory=None, samples=float("inf"))
    write_rank(tmp_path, 0, [start(0), *HOSTILE, sample(1), strange, json.dumps(sample(3))[:40]])
    (tmp_path / "run.json").write_text('{"version": 99')
    run = load_run(tmp_path)
    assert run.ranks[0].broken_lines == len(HOSTILE)  # one is empty, and the last line is cut
    assert [step["step"] for step in run.steps[0]] == [1, 2]
    assert run.steps[0][1]["loss"] is run.steps[0][1]["wire"] is run.steps[0][1]["samples"] is None
    assert any("run.json" in problem for problem in run.problems)
    assert any("rank-0.jsonl" in problem for problem in run.problems)


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="no such run folder"):
        load_run(tmp_path / "missing")
    with pytest.raises(TrimtabError, match="neither"):
        load_run(tmp_path)
    with pytest.raises(TrimtabError, match="no run in"):
        latest_run(tmp_path)


def test_a_run_that_has_only_begun_is_a_run(tmp_path: Path) -> None:
    folder = new_run_folder("a strange: name?.py", tmp_path)
    assert folder.name.endswith("-a-strange-name-")
    write_run_info(folder, command=["trimtab", "run"], script="x.py", world_size=4)
    assert new_run_folder("a strange: name?.py", tmp_path) != folder
    run = load_run(latest_run(tmp_path))
    assert run.info["script"] == "x.py"
    assert run.steps == {}
    assert not run.ended
    assert run_name("dir/train.py", "job 7") == "job-7-train"
