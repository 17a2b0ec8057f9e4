"""`trimtab plan`: what the command writes and prints, and its mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from tests.planning.planning import uneven
from tests.report.page.test_document import data_of

from trimtab.cli.plan import parse_bits, plan, rows
from trimtab.cluster import save_cluster
from trimtab.errors import TrimtabError
from trimtab.planning.plan import load_plan
from trimtab.planning.plan_search import BUDGET


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "planned_model.py").write_text(
        "import torch\nfrom tests.api.test_plan import batches, model\n\n"
        "def make():\n    return model(), batches()[0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    save_cluster(uneven(2.0), tmp_path / "c.json")
    return tmp_path


def run(folder: Path, **options: Any) -> None:
    defaults = {"model": "planned_model:make", "out": folder / "p.json", "bits": "none", "batch_size": 12}
    plan(folder / "c.json", **{**defaults, **options})


def test_the_command_writes_a_plan_and_says_what_it_holds(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(folder)
    said = capsys.readouterr().out
    for words in (
        "free shares",
        "compute ms",
        "uniform low",
        "times as fast",
        "- shares follow speed",
        "without ms",
        "step time against damage",
        "-o",
    ):
        assert words in " ".join(said.split()), words
    found = load_plan(folder / "p.json")
    assert sum(found.shares) == 12
    assert [row["samples"] for row in rows(found)] == [r.samples for r in found.roles.values()]
    run(folder, as_json=True, batch="fixed", html=folder / "p.html")
    tree = json.loads(capsys.readouterr().out)
    assert tree["batch"] == "fixed"
    assert tree["hash"] == load_plan(folder / "p.json").hash
    assert tree["gain"] > 1
    (own,) = (point for point in tree["tradeoff"] if point["chosen"])
    assert own["step_ms"] == tree["step_ms"]
    page = (folder / "p.html").read_text()
    assert "times as fast as plain DDP." in page
    titles = {card.get("title") for section in data_of(page)["sections"] for card in section["blocks"]}
    assert {
        "A step, by role",
        "Trade-off: step time against damage",
        "Precision of each operator, by depth",
    } <= titles
    assert {"precision", "rank 0 (fast)"} <= {row["adjustment"] for row in tree["adjustments"]}
    run(folder, as_json=True, adjust="exact", bits="auto")
    tree = json.loads(capsys.readouterr().out)
    assert (tree["bits"], tree["damage"], tree["reasons"][0]) == (None, 0, "only shares may be adjusted")


def test_a_plan_that_fails_leaves_the_old_file(folder: Path) -> None:
    (folder / "p.json").write_text("precious")
    for changes in ({"batch_size": 1}, {"bits": "nine"}, {"batch": "half"}, {"precision": "fp8"}):
        with pytest.raises(TrimtabError):
            run(folder, **changes)
    assert (folder / "p.json").read_text() == "precious"
    assert sorted(p.name for p in folder.iterdir() if p.suffix == ".json") == ["c.json", "p.json"]


def test_a_plan_file_is_json(folder: Path) -> None:
    with pytest.raises(TrimtabError, match=r"p\.yaml: a plan file must end in \.json"):
        run(folder, out=folder / "p.yaml")


def test_the_command_allows_the_damage_that_the_verb_allows() -> None:
    assert signature(plan).parameters["damage"].default == BUDGET


def test_bits_are_read() -> None:
    assert [parse_bits(text) for text in ("4", "none", "adaptive", "auto")] == [4, None, "adaptive", "auto"]
    for text in ("0", "9", "-1", "four", ""):
        with pytest.raises(TrimtabError, match="--bits is 1 to 8, none, adaptive or auto"):
            parse_bits(text)


def test_from_the_command_line_a_mistake_is_one_line(folder: Path) -> None:
    arguments = ["plan", "--cluster", "c.json", "--model", "planned_model:make", "--batch-size", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "trimtab.cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("trimtab: c.json: plan: a batch of 1 is smaller than the 2 ranks")
    assert not (folder / "plan.json").exists()
