"""The examples as a user runs them: alone, under torchrun, interrupted and resumed, and with mistakes."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {
    "gpt.py": "--steps=6 --batch=4 --context=32 --width=32 --layers=2 --heads=2 --warmup=1 --lr=1e-2 --log_every=1",
    "digits.py": "--epochs=2 --width=4 --batch=64 --lr=1e-2",
}
HALF = {"gpt.py": "--steps=3", "digits.py": "--epochs=1"}


def start(script: str, *arguments: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*launcher, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=100,
    )


def train(script: str, *arguments: str, ranks: int = 0) -> dict[str, Any]:
    """The results that a tiny run prints as its last line; later arguments win over the tiny ones."""
    outcome = start(script, *TINY[script].split(), "--device=cpu", "--json=1", *arguments, ranks=ranks)
    assert outcome.returncode == 0, outcome.stderr
    results: dict[str, Any] = json.loads(outcome.stdout.splitlines()[-1])
    return results


def test_gpt_learns_alone() -> None:
    results = train("gpt.py", "--steps=30")
    assert results["world_size"] == 1
    assert results["first_loss"] == pytest.approx(5.545, abs=0.1)  # ln 256: knows nothing yet
    assert results["final_loss"] < 4
    assert results["validation_loss"] < 4
    assert results["median_step_ms"] > 0


@pytest.mark.soak
def test_digits_learns_alone() -> None:
    results = train("digits.py", "--epochs=3")
    assert results["accuracy"] > 0.8  # one in ten by chance


@pytest.mark.soak
def test_gpt_learns_and_resumes_under_torchrun(tmp_path: Path) -> None:
    saved = tmp_path / "half.pt"
    half = train("gpt.py", HALF["gpt.py"], f"--checkpoint={saved}", ranks=2)
    whole = train("gpt.py", f"--resume={saved}", ranks=2)
    assert half["world_size"] == whole["world_size"] == 2
    assert half["first_loss"] > half["final_loss"] > whole["final_loss"]


def test_digits_learns_under_torchrun() -> None:
    results = train("digits.py", ranks=2)
    assert results["world_size"] == 2
    assert results["accuracy"] > 0.5


@pytest.mark.parametrize("script", [pytest.param("gpt.py", marks=pytest.mark.soak), "digits.py"])
def test_resumed_run_equals_the_uninterrupted_one_to_the_bit(script: str, tmp_path: Path) -> None:
    whole, half, rest = (tmp_path / name for name in ("whole.pt", "half.pt", "rest.pt"))
    uninterrupted = train(script, f"--checkpoint={whole}")
    train(script, HALF[script], f"--checkpoint={half}")
    resumed = train(script, f"--resume={half}", f"--checkpoint={rest}")
    assert resumed["validation_loss"] == uninterrupted["validation_loss"]
    expected, found = (torch.load(path, weights_only=True) for path in (whole, rest))
    assert_same(expected, found)
    assert not torch.equal(*(first_parameter(torch.load(path, weights_only=True)) for path in (whole, half)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half.pt", "rest.pt", "whole.pt"]


def first_parameter(state: dict[str, Any]) -> torch.Tensor:
    tensor: torch.Tensor = next(iter(state["model"].values()))
    return tensor


def assert_same(expected: Any, found: Any) -> None:
    assert type(expected) is type(found)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(expected, found)
    elif isinstance(expected, dict):
        assert expected.keys() == found.keys()
        for key in expected:
            assert_same(expected[key], found[key])
    elif isinstance(expected, (list, tuple)):
        for left, right in zip(expected, found, strict=True):
            assert_same(left, right)
    else:
        assert expected == found


@pytest.mark.parametrize("script", ["gpt.py", "digits.py"])
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--stpes=3"], "'--stpes=3' is not --name=value"),
        (["batch=3"], "'batch=3' is not --name=value"),
        (["--batch=many"], "--batch takes int, not 'many'"),
        (["--batch=0"], "--batch must be at least 1, not 0"),
        (["--device=tpu"], "--device is auto, cpu or cuda, not 'tpu'"),
    ],
)
def test_mistaken_knob_is_named(script: str, arguments: list[str], complaint: str) -> None:
    module = runpy.run_path(str(EXAMPLES / script))
    with pytest.raises(SystemExit) as caught:
        module["read_knobs"](arguments)
    assert str(caught.value).startswith(f"{script}: ")
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("script", "arguments", "complaint"),
    [
        ("gpt.py", ["--width=10", "--heads=4"], "--width=10 cannot be divided among --heads=4"),
        ("gpt.py", ["--resume=nowhere.pt"], "--resume=nowhere.pt: no such file"),
        ("digits.py", [f"--resume={__file__}"], "is not a checkpoint of this model"),
    ],
)
def test_mistake_ends_in_one_line(script: str, arguments: list[str], complaint: str) -> None:
    outcome = start(script, "--device=cpu", *arguments)
    assert outcome.returncode == 1
    assert outcome.stdout == ""
    (line,) = outcome.stderr.splitlines()
    assert line.startswith(f"{script}: ")
    assert complaint in line
