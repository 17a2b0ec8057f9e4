"""The page's data from run folders: whole, empty, of one rank, crashed, half-written and hostile."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.made_up import write_run
from tests.report.page.test_document import MARKUP, data_of

from trimtab.report.page.compare import compared_document
from trimtab.report.page.document import MOST_BYTES, Document, fitted, to_html
from trimtab.report.page.run import run_document
from trimtab.report.page.run_data import RunData
from trimtab.report.run_folder import load_run
from trimtab.report.trace import traced_steps

RECORDED = Path(__file__).with_name("recorded")
"""A run folder as the ranks wrote it: `trimtab demo` on two emulated hosts, taken over by tools/record_demo.py."""


def document_of(folder: Path, points: int = 100) -> Document:
    return run_document(RunData(run=load_run(folder)), points)


def cards(document: Document, section: str) -> list[dict[str, Any]]:
    return next(list(one.blocks) for one in document.sections if one.id == section)


def card(document: Document, section: str, title: str) -> dict[str, Any]:
    return next(one for one in cards(document, section) if one.get("title") == title)


def said(document: Document) -> str:
    return " ".join(note for _, note in document.notes)


def test_a_whole_run(tmp_path: Path) -> None:
    document = document_of(write_run(tmp_path / "run"))
    assert document.verdict.startswith(
        "129 ms a step, 3.04 times as fast as plain DDP (predicted), 83% of the ideal; loss "
    )
    assert document.notes == []
    by_rank = card(document, "overview", "Where the step went, by rank")
    assert [row["label"] for row in by_rank["rows"]] == [
        label for rank in range(4) for label in (f"rank {rank}", "predicted")
    ]
    assert sum(by_rank["rows"][0]["values"]) == pytest.approx(0.129, abs=1e-3)
    assert "waits for rank" in by_rank["rows"][0]["note"]
    step = card(document, "step", "Predicted beside measured")
    assert step["rows"][0][1] == pytest.approx(0.103, abs=1e-3)  # compute and optimizer
    assert step["rows"][0][2] == 0.098
    trace = card(document, "step", "Step 50, rank by rank")
    assert [lane["label"] for lane in trace["lanes"]][:4] == [
        "rank 0",
        "0 · codec",
        "0 · wire",
        "0 · waiting",
    ]
    bits = card(document, "settings", "Bits of each layer's gradients over time")
    assert bits["rows"][0] == "blocks.0.attn.qkv.weight"
    assert bits["values"][0] == ["raw"] * 3
    assert bits["scale"] == [2, 3, 4, 8, "raw"]
    shares = card(document, "settings", "Batch shares: samples of each rank")
    assert [(one["name"], one["y"][0], one["y"][-1]) for one in shares["series"]] == [
        ("ranks 0, 1", 16, 22),
        ("ranks 2, 3", 16, 10),
    ]
    precision = card(document, "settings", "Precision of each operator, by depth")
    assert precision["scale"] == ["int8", "bf16", "as written"]
    tradeoff = card(document, "settings", "Trade-off: step time against damage")
    assert tradeoff["dots"] == [{"x": 0.0048, "y": 0.124, "label": "chosen"}]
    controller = cards(document, "controller")[0]["items"]
    assert [item["label"] for item in controller] == ["plan", "compress", "shares", "guard", "warning"]
    assert any(line.startswith("brought: step 2") for line in controller[2]["more"])
    loss = card(document, "loss", "Loss")
    assert [axis["name"] for axis in loss["x"]] == ["step", "time", "bytes sent"]
    assert [mark["tone"] for mark in loss["marks"]] == ["", "", "bad"]
    memory = card(document, "resources", "Memory")
    assert [limit["label"] for limit in memory["limits"]] == ["limit of rank 0, 1", "limit of rank 2, 3"]
    command = cards(document, "environment")[0]["text"]
    assert command == "cd /home/user/job\nOMP_NUM_THREADS=4 trimtab run --nproc-per-node 4 train.py"


def test_a_recorded_run() -> None:
    document = document_of(RECORDED)
    assert re.fullmatch(
        r"[\d.]+ m?s a step, [\d.]+ times as fast as plain DDP \((predicted|measured)\), \d+% of the ideal; "
        r"loss [\d.]+ → [\d.]+\.",
        document.verdict,
    )
    assert document.notes == []
    by_rank = card(document, "overview", "Where the step went, by rank")
    measured = [row for row in by_rank["rows"] if not row.get("faint")]
    seconds = [RunData(run=load_run(RECORDED)).mean_of(rank, "seconds") for rank in (0, 1)]
    assert [sum(row["values"]) for row in measured] == pytest.approx(seconds, rel=1e-3)
    labels = [item["label"] for item in cards(document, "controller")[0]["items"]]
    assert {"plan", "compress"} <= set(labels)
    for title in ("Bits of each layer's gradients over time", "Batch shares: samples of each rank"):
        assert card(document, "settings", title)
    assert card(document, "step", f"Step {traced_steps(load_run(RECORDED))[-1]}, rank by rank")["lanes"]


def test_prices_give_costs(tmp_path: Path) -> None:
    data = RunData(run=load_run(write_run(tmp_path / "run")), prices={0: 0.7, 1: 0.7, 2: 0.3, 3: 0.3})
    table = card(run_document(data, 50), "resources", "Cost")
    assert table["rows"][0][1] == pytest.approx(2.0)
    assert table["rows"][0][2] == pytest.approx(2.0 * data.seconds / 3600)
    assert table["rows"][1][2] > 2.9 * table["rows"][0][2]


def test_ten_thousand_steps_of_eight_ranks_fit_a_megabyte(tmp_path: Path) -> None:
    data = RunData(run=load_run(write_run(tmp_path / "run", steps=10_000, ranks=8)))
    html = fitted(lambda points: run_document(data, points))
    assert len(html.encode()) <= MOST_BYTES
    assert len(fitted(lambda points: compared_document(data, data, points)).encode()) <= MOST_BYTES


def test_an_empty_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"version": 1, "script": "train.py"}')
    document = document_of(tmp_path)
    assert document.verdict == "No training step was recorded."
    assert "No rank has written any event" in said(document)
    assert data_of(to_html(document))["sections"]


def test_one_rank_has_nothing_to_balance(tmp_path: Path) -> None:
    document = document_of(write_run(tmp_path / "run", ranks=1))
    assert "One rank: there is nothing to exchange" in said(document)
    assert "ideal" not in document.verdict


def test_a_crash_is_named(tmp_path: Path) -> None:
    document = document_of(write_run(tmp_path / "run", status=1))
    assert "The run crashed: rank 1 (exit status 1)." in said(document)


def test_a_half_written_run_shows_what_is_there(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    file = folder / "rank-1.jsonl"
    file.write_text(file.read_text()[:-40_001])
    (folder / "rank-3.jsonl").unlink()
    document = document_of(folder)
    assert "Rank 1 wrote no end: still running, or killed." in said(document)
    assert "Of 4 ranks only 3 have events" in said(document)
    assert "lines are not events" in said(document)


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    first = RunData(run=load_run(write_run(tmp_path / "first", pace=1.6)))
    second = RunData(run=load_run(write_run(tmp_path / "second", steps=640)))
    document = compared_document(first, second, 100)
    assert document.verdict.startswith(
        "B is 1.55 times as fast as A: 199 ms → 128 ms a step; at step 640 the losses are"
    )
    assert [series["name"] for series in card(document, "loss", "Loss")["series"]] == ["A", "B"]
    assert [item["title"] for item in cards(document, "step")[0]["items"]] == ["A: first", "B: second"]


HOSTILE: tuple[Any, ...] = (
    None,
    True,
    -1,
    1e308,
    10**300,
    2**53 - 1,
    "nan",
    MARKUP,
    [],
    {},
    [[]],
    {"a": None},
    [1e308, "x"],
    0.0,
    -1e308,
)


def test_no_value_of_any_event_breaks_the_page(tmp_path: Path) -> None:
    """Values of real events are replaced at random, at every depth; what is left out is left out without an error."""
    chance = random.Random(21)
    folder = write_run(tmp_path / "run", steps=120)
    whole = {file: file.read_text().splitlines() for file in sorted(folder.iterdir())}
    for _ in range(20):
        for file, texts in whole.items():
            file.write_text("\n".join(_damaged(line, chance, 0.15) for line in texts))
        data = RunData(run=load_run(folder))
        html = to_html(run_document(data, 20))
        assert data_of(html)["sections"]
        to_html(compared_document(data, data, 20))


def _damaged(line: str, chance: random.Random, rate: float) -> str:
    if chance.random() < 0.03:
        return line[: len(line) // 2]

    def damage(value: Any) -> Any:
        if chance.random() < rate:
            return chance.choice(HOSTILE)
        if isinstance(value, dict):
            return {
                (MARKUP if chance.random() < rate / 20 else key): damage(item) for key, item in value.items()
            }
        return [damage(item) for item in value] if isinstance(value, list) else value

    tree = json.loads(line)
    kind = tree.get("kind")
    tree = {key: damage(item) if chance.random() < 0.4 else item for key, item in tree.items()}
    return json.dumps(tree | ({"kind": kind} if kind else {}))
