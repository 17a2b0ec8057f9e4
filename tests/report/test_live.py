"""The live view: what it shows, and that it follows a folder that grows."""

from __future__ import annotations

import json
from pathlib import Path

from tests.report.run_cases import STARTED, end, sample, start, two_ranks

from trimtab.report.live import LiveRun, frame_lines
from trimtab.report.run_folder import load_run
from trimtab.report.summary import duration, size, summary_lines

COMPRESS = {
    "time": STARTED,
    "kind": "decision",
    "step": 0,
    "what": "compress",
    "decided": "compress, 3 bits at first",
    "expected": {"plain_s": 0.18, "compressed_s": 0.011},
    "after": 3,
}
REPLAN = {
    "time": STARTED + 1,
    "kind": "decision",
    "step": 9,
    "what": "plan",
    "before": "a",
    "after": "b",
    "decided": "b",
}


def test_a_frame_shows_every_rank_and_the_last_decisions(tmp_path: Path) -> None:
    progress = {"time": STARTED, "kind": "progress", "step": 0, "total_steps": 2012}
    lines = frame_lines(load_run(two_ranks(tmp_path, COMPRESS, REPLAN, progress)), 120, color=False)
    assert lines[0].startswith(
        "train.py: ended, step 12, 10 steps/s, 560 samples/s, loss 0.08333, 3 min 20 s left"
    )
    assert lines[1].split()[:6] == ["rank", "step", "ms/step", "samples", "share", "bits"]
    assert lines[2].split()[:9] == ["0", "12", "100", "32", "57%", "3.2", "30%", "1", "8%"]
    assert lines[3].split()[:7] == ["1", "12", "100", "24", "43%", "3.2", "0%"]
    assert [line.strip() for line in lines[4:]] == ["step 0: compress, 3 bits at first", "step 9: b"]


def test_the_end_of_the_epoch_where_that_of_the_job_is_unknown(tmp_path: Path) -> None:
    progress = {"time": STARTED, "kind": "progress", "step": 2, "total_steps": None, "epoch_ends": 112}
    (first, *_) = frame_lines(load_run(two_ranks(tmp_path, progress)), 120, color=False)
    assert first.endswith("10 s left of the epoch")
    over = {**progress, "total_steps": 5, "epoch_ends": "<b>"}
    (first, *_) = frame_lines(load_run(two_ranks(tmp_path, progress, over)), 120, color=False)
    assert " left" not in first


def test_what_lasts_is_kept_however_many_events_follow(tmp_path: Path) -> None:
    device = {"time": STARTED, "kind": "device", "step": 0, "memory_limit": 4 * 10**9}
    progress = {"time": STARTED, "kind": "progress", "step": 0, "total_steps": 1000}
    noise = [{"time": STARTED, "kind": "warning", "step": n, "message": "x"} for n in range(400)]
    events = [start(0, world_size=1), device, progress, *map(sample, range(1, 150)), *noise]
    (tmp_path / "rank-0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    lines = frame_lines(LiveRun(tmp_path).poll(), 200, color=False)
    assert "left of 1,000 steps" in lines[0]
    assert "(25%)" in lines[2], "of the memory"


def test_a_growing_folder_is_followed(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run")
    assert live.poll().ranks == {}
    assert "starting" in frame_lines(live.poll(), 100, color=False)[0]
    (tmp_path / "run").mkdir()
    whole = "".join(
        json.dumps(event) + "\n" for event in [start(0, world_size=1), *map(sample, range(1, 300)), end()]
    )
    file = tmp_path / "run" / "rank-0.jsonl"
    middle = len(whole) // 2  # inside a line
    file.write_text(whole[:middle])
    before = live.poll()
    assert not before.ended
    seen = before.steps[0][-1]["step"]
    with file.open("a") as more:
        more.write(whole[middle:])
    after = live.poll()
    assert after.ended
    steps = [step["step"] for step in after.steps[0]]
    assert steps == list(range(200, 300)), "the last hundred"
    assert seen < 299


def test_a_run_that_never_took_a_step_is_not_starting_forever(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "script": "train.py", "started": 0.0}))
    assert frame_lines(load_run(tmp_path), 100, color=False)[0].startswith("train.py: no step in ")


def test_the_summary_says_what_was_saved(tmp_path: Path) -> None:
    folder = two_ranks(tmp_path, COMPRESS, REPLAN)
    lines = summary_lines(load_run(folder))
    assert all(len(line) <= 111 for line in lines), "with the name in front they fit a line"
    assert lines[0] == (
        "12 steps in 1.2 s, 10 steps/s, 560 samples/s; rank 0: 30% waiting for ranks, 8% for the link"
    )
    assert lines[1] == (
        "sent 12 MB a rank instead of 120 MB; about 2.03 s of exchanges saved (predicted); 3.2 bits a value"
    )
    assert lines[2] == "batch shares 32/24; 1 new plan"
    (tmp_path / "rank-0.jsonl").write_text("")
    (tmp_path / "rank-1.jsonl").write_text("")
    assert summary_lines(load_run(folder)) == []


def test_units() -> None:
    assert [duration(seconds) for seconds in (0.5, 61, 3_725, 90_000)] == [
        "0.5 s",
        "61 s",
        "1 h 02 min",
        "25 h 00 min",
    ]
    assert [size(nbytes) for nbytes in (5, 1500, 2e9, 3e15)] == ["5 B", "1.5 kB", "2 GB", "3e+03 TB"]
