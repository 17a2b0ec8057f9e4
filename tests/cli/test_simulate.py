"""`trimtab simulate`: what the command prints and writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.predict.profiles import cluster, profile
from tests.report.page.test_document import data_of

from trimtab.cli.simulate import simulate
from trimtab.cluster import save_cluster
from trimtab.errors import TrimtabError


def test_measurements_of_another_version_are_refused(tmp_path: Path) -> None:
    old = replace(cluster(), profile=replace(profile(), trimtab="0.0.1"))
    save_cluster(old, tmp_path / "c.json")
    with pytest.raises(TrimtabError, match=r"measured with trimtab 0\.0\.1"):
        simulate(tmp_path / "c.json", "gpt", batch=2, as_json=True)


def test_plans_of_another_version_are_refused_by_their_own_name(tmp_path: Path) -> None:
    save_cluster(cluster(), tmp_path / "c.json")
    (tmp_path / "p.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(TrimtabError, match=r"version mismatch: found 1.*trimtab plan") as refused:
        simulate(tmp_path / "c.json", "gpt", batch=2, plan=tmp_path / "p.json", as_json=True)
    assert str(refused.value).startswith(f"{tmp_path / 'p.json'}")


@pytest.mark.parametrize(("samples", "far"), [(8, False), (40, True)])
def test_batches_far_from_those_probed_are_said_once(
    samples: int,
    far: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "far_model.py").write_text(
        "from tests.measure.capture.models import MODELS, batch_for\n\n"
        "def make():\n    return MODELS['gpt'](), batch_for('gpt', 2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    save_cluster(cluster(), tmp_path / "c.json")
    simulate(tmp_path / "c.json", "far_model:make", batch=samples, link_factor=2.0, bits=4, as_json=True)
    said = capsys.readouterr()
    assert said.err.count("trimtab probe --batch 20,40,60") == far
    assert all((o["out_of_reach"] is not None) == far for o in json.loads(said.out)["outcomes"])


def test_the_command_prints_json_and_a_trace(tmp_path: Path) -> None:
    (tmp_path / "own_model.py").write_text(
        "from tests.measure.capture.models import MODELS, batch_for\n\n"
        "def make():\n"
        "    batch = batch_for('gpt', 2)\n"
        "    return MODELS['gpt'](), batch if isinstance(batch, tuple) else (batch,)\n"
    )
    save_cluster(cluster(), tmp_path / "c.json")
    words = [sys.executable, "-m", "trimtab.cli", "simulate", "--model", "own_model:make", "--batch", "2"]
    done = subprocess.run(
        [*words, "--cluster", str(tmp_path / "c.json"), "--bits", "4", "--json", "--trace", "t.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)["outcomes"]
    assert [o["what"] for o in outcomes] == ["as given", "gradients in 4 bits"]
    assert outcomes[0]["bottleneck"].startswith("as given: ")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_what_ifs_are_planned_priced_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.cli.test_away import on_gpus

    alone = replace(on_gpus(), hosts=tuple(replace(host, link=None) for host in on_gpus().hosts), links={})
    save_cluster(alone, tmp_path / "c.json")
    options: dict[str, Any] = {
        "batch": 3,
        "add": ["2xrtx 3090", "T4"],
        "remove": ["b"],
        "link": "1gbit",
        "as_json": True,
    }
    page = tmp_path / "page.html"
    simulate(tmp_path / "c.json", **options, price=["RTX-3090=0.4"], budget_per_hour=2.5, html=page)
    overview, step, cost = data_of(page.read_text())["sections"]
    assert len(overview["blocks"][0]["rows"]) == 5
    assert step["blocks"][0]["lanes"]
    assert "with 2xrtx 3090" in [series["name"] for series in cost["blocks"][0]["series"]]
    found = json.loads(capsys.readouterr().out)
    given, planned, *changed = found["outcomes"]
    assert [case["what"] for case in changed] == ["without b", "with 2xrtx 3090", "with T4"]
    assert planned["samples_per_s"] > given["samples_per_s"]
    assert changed[1]["price_per_hour"] == pytest.approx(1.5 + 0.8)
    assert changed[1]["estimated"] == "rtx-3090"
    assert "cost_per_million_samples" not in changed[2], "a T4 has no price here"
    assert any(
        text.startswith("within 2.5 an hour the fastest is: with 2xrtx 3090") for text in found["verdicts"]
    )
    assert any("price in: with T4" in text for text in found["verdicts"])
    # Without time to plan, shares are even, and that is said.
    simulate(tmp_path / "c.json", **options, seconds=0.0, batch_size=8)
    said = capsys.readouterr()
    assert not any(case["planned"] for case in json.loads(said.out)["outcomes"][1:])
    assert "no time was left to plan it" in said.err
