"""Events of a rank: written in order, never in the way of the job."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trimtab.environment import logger
from trimtab.report import events
from trimtab.report.events import EventWriter, to_json


def lines(folder: Path, rank: int = 0) -> list[dict[str, object]]:
    text = (folder / f"rank-{rank}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines() if line]


def test_events_are_lines_between_a_start_and_an_end(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "new" / "run", 3)
    writer.put({"time": 1.0, "kind": "decision", "step": 7, "loss": float("nan")})
    writer.put(lambda: [{"time": 2.0, "kind": "made later", "step": threading.get_ident()}])
    writer.status = 0
    writer.close()
    start, decision, later, end = lines(tmp_path / "new" / "run", 3)
    assert (start["kind"], start["rank"], start["version"]) == ("start", 3, 1)
    assert decision == {"time": 1.0, "kind": "decision", "step": 7, "loss": "nan"}
    assert later["step"] != threading.get_ident(), "made on the writer's thread"
    assert (end["kind"], end["status"], end["dropped"]) == ("end", 0, 0)


def test_rank_0_describes_the_run_and_does_not_replace_a_description(tmp_path: Path) -> None:
    EventWriter(tmp_path, 0).close()
    info = json.loads((tmp_path / "run.json").read_text())
    assert info["version"] == 1
    assert info["environment"]["packages"]["torch"]
    (tmp_path / "run.json").write_text('{"version": 1, "script": "first.py"}')
    EventWriter(tmp_path, 0).close()
    assert json.loads((tmp_path / "run.json").read_text())["script"] == "first.py"
    assert [event["kind"] for event in lines(tmp_path)] == ["start", "end"] * 2, "a restarted rank appends"


def test_a_full_queue_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_WAITING", 10)
    writer = EventWriter(tmp_path, 0, every_s=30.0)
    for number in range(50):
        writer.put({"time": 0.0, "kind": "x", "step": number})
    writer.close()
    kept = [event["step"] for event in lines(tmp_path) if event["kind"] == "x"]
    assert kept == list(range(len(kept)))
    assert lines(tmp_path)[-1]["dropped"] == 50 - len(kept) > 0


def test_an_event_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, 0)
    writer.put(lambda: [{"step": 1 // 0}])
    writer.close()
    (warning,) = [event for event in lines(tmp_path) if event["kind"] == "warning"]
    assert "ZeroDivisionError" in str(warning["message"])


@pytest.mark.parametrize("folder", ["a file", "/dev/full/run"])
def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path, folder: str) -> None:
    (tmp_path / "a file").write_text("")
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger().addHandler(handler)
    try:
        writer = EventWriter(tmp_path / folder, 0, every_s=0.01)
        for step in range(20):
            writer.put({"time": 0.0, "kind": "x", "step": step})
            time.sleep(0.002)
        writer.live = {"step": 1}
        writer.close()
    finally:
        logger().removeHandler(handler)
    assert len(warnings) == 1
    assert "no more events are written" in warnings[0]


def test_a_full_disk_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "rank-0.jsonl").symlink_to("/dev/full")
    writer = EventWriter(tmp_path, 0)
    writer.close()
    assert writer._broken


KILLED = """
import os, time, sys
from trimtab.report import events
events.emit("decision", what="bits")
time.sleep(1.0)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_job_leaves_readable_lines(tmp_path: Path) -> None:
    environment = {**os.environ, "TRIMTAB_RUN_DIR": str(tmp_path), "RANK": "2"}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], env=environment, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGKILL)
    assert [event["kind"] for event in lines(tmp_path, 2)] == ["start", "decision"]


def test_without_a_folder_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIMTAB_RUN_DIR", raising=False)
    events.emit("decision", what="bits")
    assert events.writer() is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(float("inf"), '"inf"'), ([1.0, float("-inf")], '[1.0,"-inf"]'), ({"a": None}, '{"a":null}')],
)
def test_numbers_that_json_lacks_are_strings(value: object, text: str) -> None:
    assert to_json({"x": value}) == f'{{"x":{text}}}'
