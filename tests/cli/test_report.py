"""`trimtab report` and the pages of other commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.report.page.made_up import plan, write_run
from tests.report.page.test_document import data_of

from trimtab.bench.harness import Result
from trimtab.cli import main
from trimtab.cli.bench_command import write_bench_page
from trimtab.report.page.document import to_html
from trimtab.report.page.predicted import plan_document, simulation_document

CLUSTER = """
version: 1
devices:
  big: {kind: cuda, speed: 1.0, memory_gib: 24, price_per_hour: 0.7}
  small: {kind: cuda, speed: 0.4, memory_gib: 16, price_per_hour: 0.3}
hosts:
  - {name: node-0, devices: {big: 2}, link: office}
  - {name: node-1, devices: {small: 2}, link: office}
links:
  office: {gbit_per_s: 1.0, latency_us: 50}
"""


def run_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def test_the_newest_run_with_its_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_run(tmp_path / "trimtab-runs" / "first", steps=100)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    assert run_command("report", "--cluster", "cluster.yaml", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["out"] == "trimtab-runs/first/report.html"
    assert answer["verdict"].startswith("1")
    sections = {one["id"]: one for one in data_of((folder / "report.html").read_text())["sections"]}
    hosts = next(block for block in sections["overview"]["blocks"] if block.get("title") == "Hosts and links")
    assert hosts["rows"][0][3] == 1
    cost = next(block for block in sections["resources"]["blocks"] if block.get("title") == "Cost")
    assert cost["rows"][0][1] == 2


def test_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = write_run(tmp_path / "before", pace=2, steps=80), write_run(tmp_path / "after", steps=80)
    assert run_command("report", str(before), str(after)) == 0
    shown = capsys.readouterr().out
    assert "B is 1.9" in shown
    assert shown.splitlines()[-1] == f"report: {after / 'comparison.html'}"
    assert (after / "comparison.html").stat().st_size < 1_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "there is no such run folder"),
        (["."], "this is no run folder"),
        ([], "there is no run in"),
        (["a", "b", "c"], "one or two run folders"),
        (["run", "--out", "page.txt"], "must end in .html"),
        (["run", "--out", "missing/page.html"], "missing"),
        (["run", "--price", "T4"], "write a device and what it costs"),
    ],
)
def test_bad_input(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", steps=10)
    assert run_command("report", *arguments) == 2
    assert message in capsys.readouterr().err


def test_the_page_of_a_bench(tmp_path: Path) -> None:
    rows = [{"method": "ddp", "step_ms": 120.0}, {"method": "trimtab", "step_ms": 40.0, "loss": [1, 2]}]
    result = Result(
        bench="ddp", summary={"over_ddp": 3.0}, rows=rows, environment={"command": "trimtab bench ddp"}
    )
    write_bench_page(result, tmp_path / "bench.html")
    sections = data_of((tmp_path / "bench.html").read_text())["sections"]
    chart = sections[0]["blocks"][0]
    assert [(row["label"], row["values"]) for row in chart["rows"]] == [("ddp", [0.12]), ("trimtab", [0.04])]
    assert sections[1]["blocks"][0]["text"] == "trimtab bench ddp"


def test_the_page_of_a_plan_and_of_a_simulation() -> None:
    document = plan_document(plan(), title="plan.json", model="gpt")
    assert document.verdict == "124 ms a step is predicted, 3.15 times as fast as plain DDP."
    assert document.subtitle == "gpt · 4 ranks · global batch 64"
    assert [one["id"] for one in data_of(to_html(document))["sections"]] == ["overview", "why", "precision"]
    outcomes = [
        {"what": "as given", "ranks": 4, "step_ms": 90.0, "price_per_hour": 2.0, "samples_per_s": 100.0}
    ]
    spans = [
        (0, "forward", "all", 0.0, 0.03),
        (None, "wire", "bucket 0", 0.03, 0.09),
        (0, "odd", "", 0.0, 0.1),
    ]
    simulated = simulation_document(
        model="gpt", outcomes=outcomes, cases=[], said=["the link"], roles=["T4"], timeline=spans
    )
    step = data_of(to_html(simulated))["sections"][1]["blocks"][0]
    assert [(lane["label"], len(lane["spans"])) for lane in step["lanes"]] == [("T4", 1), ("wire", 1)]
