"""`trimtab.plan` and its command line: what a user sees, and every mistake by name."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.measure.capture.models import MODELS, batch_for
from tests.planning.planning import FAST, SLOW, uneven
from tests.predict.profiles import profile, workload
from torch import nn

import trimtab
from trimtab.cli.plan import command, parse_bits, rows
from trimtab.cluster import save_cluster
from trimtab.errors import TrimtabError
from trimtab.measure.fingerprint import fingerprint
from trimtab.planning.plan_file import load_plan
from trimtab.planning.what_if import planned, simulate


def model() -> nn.Module:
    torch.manual_seed(0)
    return MODELS["gpt"]()


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    (sample,) = batch_for("gpt", 2)
    return [(torch.randint(0, 64, sample.shape, generator=generator),) for _ in range(2)]


def test_a_model_and_its_data_give_a_plan() -> None:
    found = trimtab.plan(model(), uneven(1.04), 8, batches=batches(), batch="fixed")
    assert found.model == fingerprint(model())
    assert found.trimtab == trimtab.__version__
    assert found.roles[FAST].precisions == {}
    low = found.roles[SLOW].precisions
    assert low
    assert set(low) <= set(workload().settings)
    assert 0 < found.predicted.damage < found.predicted.uniform_damage
    # What it predicts is what the simulator says of it.
    given, setting = planned(found, uneven(1.04))
    assert simulate(given, workload(), setting).timeline.step_s == pytest.approx(found.predicted.step_s)


def test_plan_is_an_ordinary_function() -> None:
    assert inspect.isfunction(trimtab.plan)
    assert [*inspect.signature(trimtab.plan).parameters][:3] == ["model", "cluster", "batch_size"]
    assert "plan" in dir(trimtab)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"batch_size": 1}, "a batch of 1 is smaller than the 2 ranks"),
        ({"batches": None}, "pass batches="),
        ({"precisions": ["fp8"]}, "'fp8' was not probed on any device class .*fast: fp32, int8"),
        ({"indicator": "tarot"}, "no indicator 'tarot'"),
        ({"indicator": "depth"}, "'depth' ranks operators but does not tell how much"),
        ({"damage": -1.0}, "damage of -1"),
        ({"damage": float("nan")}, "damage of nan"),
        ({"bits": 3}, "not measured at 3 bits"),
        ({"cluster": replace(uneven(), profile=None)}, "holds no measurements; run `trimtab probe"),
        (
            {"cluster": replace(uneven(), profile=replace(profile(), trimtab="0.0.1"))},
            r"measured with trimtab 0\.0\.1",
        ),
        ({"model": nn.Sequential(nn.Linear(3, 3)), "batches": [torch.zeros(2, 3)]}, "was not measured on"),
    ],
)
def test_a_mistake_is_named(keywords: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"model": model(), "cluster": uneven(), "batch_size": 8, "batches": batches()}
    if "model" in keywords:
        keywords = {**keywords, "loss": lambda y: y.sum()}
    with pytest.raises(TrimtabError, match=words):
        trimtab.plan(**{**given, **keywords})


def test_another_model_is_refused_before_it_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    other = nn.Sequential(nn.Linear(3, 3))
    ran = []
    monkeypatch.setattr("trimtab.api.plan.damage_of", lambda *args, **kwargs: ran.append(args))
    with pytest.raises(TrimtabError, match="was not measured on"):
        trimtab.plan(other, uneven(), 8, batches=[torch.zeros(2, 3)], loss=lambda y: y.sum())
    assert not ran


@pytest.mark.parametrize(("batch_size", "far"), [(8, False), (24, False), (96, True)])
def test_batches_far_from_those_probed_are_said(
    batch_size: int, far: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    trimtab.plan(model(), uneven(1.0), batch_size, batches=batches(), batch="fixed")
    said = capsys.readouterr().err
    assert (f"{SLOW} has {batch_size // 2} samples and was probed at 2, 6" in said) == far
    assert ("trimtab probe --batch 24,48,72" in said) == far


# Fingerprints


def test_a_fingerprint_is_of_structure_alone() -> None:
    one = model()
    with torch.device("meta"):
        empty = MODELS["gpt"]()
    assert fingerprint(one) == fingerprint(empty)
    low = trimtab.set_precision(model(), {"blocks.*": "bf16"})
    assert fingerprint(low) == fingerprint(one)
    for parameter in one.parameters():
        parameter.requires_grad_(False)
    assert fingerprint(one) == fingerprint(empty)


def test_another_model_has_another_fingerprint() -> None:
    made = {
        fingerprint(m)
        for m in (
            nn.Sequential(nn.Linear(2, 3)),
            nn.Sequential(nn.Linear(3, 2)),
            nn.Sequential(nn.Linear(2, 3, bias=False)),
            nn.Sequential(nn.Linear(2, 3)).bfloat16(),
            nn.Sequential(nn.Identity(), nn.Linear(2, 3)),
        )
    }
    assert len(made) == 5


# The command


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


def run(folder: Path, **changes: Any) -> None:
    given: dict[str, Any] = {
        "bits": "none",
        "batch": "free",
        "as_json": False,
        "batch_size": 12,
        "damage": 0.01,
        "indicator": "variance",
        "precisions": None,
        "autocast": None,
    }
    command(folder / "c.json", "planned_model:make", folder / "p.json", **{**given, **changes})


def test_the_command_writes_a_plan_and_says_what_it_holds(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(folder)
    said = capsys.readouterr().out
    for words in ("free shares", "compute ms", "uniform low", "times as fast", "- shares follow speed"):
        assert words in " ".join(said.split()), words
    found = load_plan(folder / "p.json")
    assert sum(found.shares) == 12
    assert [row["samples"] for row in rows(found)] == [r.samples for r in found.roles.values()]
    run(folder, as_json=True, batch="fixed")
    tree = json.loads(capsys.readouterr().out)
    assert tree["batch"] == "fixed"
    assert tree["hash"] == load_plan(folder / "p.json").hash
    assert tree["gain"] > 1


def test_a_plan_that_fails_leaves_the_old_file(folder: Path) -> None:
    (folder / "p.json").write_text("precious")
    for changes in ({"batch_size": 1}, {"bits": "nine"}, {"batch": "half"}, {"precisions": ["fp8"]}):
        with pytest.raises(TrimtabError):
            run(folder, **changes)
    assert (folder / "p.json").read_text() == "precious"
    assert sorted(p.name for p in folder.iterdir() if p.suffix == ".json") == ["c.json", "p.json"]


def test_a_plan_file_is_json(folder: Path) -> None:
    with pytest.raises(TrimtabError, match=r"p\.yaml: a plan file ends in \.json"):
        command(folder / "c.json", "gpt", folder / "p.yaml", bits="none", batch="free", as_json=False)


def test_the_command_allows_the_damage_that_the_verb_allows() -> None:
    from inspect import signature

    from trimtab import cli
    from trimtab.planning.compose import BUDGET

    assert signature(cli.plan).parameters["damage"].default == BUDGET


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
