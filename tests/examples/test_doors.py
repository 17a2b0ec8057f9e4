"""Every example of a verb or a door trains on two unequal hosts with a slow link between them."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tests.emulate.machines import pair
from tests.support.requirements import requires

from trimtab.emulate import Emulation

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DRIVER = str(Path(__file__).with_name("run_examples.py"))
LONGER = {"gpt", "digits"}
"""Whole training scripts with checkpoints and options; `test_examples.py` runs them."""

COMPRESSED = "the link is the bottleneck"


def learned(text: str) -> bool:
    first, last = re.findall(r"loss ([\d.]+) -> ([\d.]+)", text)[0]
    return float(last) < float(first)


def outputs(*examples: str, timeout: float = 360) -> dict[str, str]:
    """What rank 0 printed in each example."""
    with Emulation(pair(speed=0.5, gbit_per_s=0.1)) as emulation:
        outcome = emulation.run(
            [DRIVER, *examples], env={"OMP_NUM_THREADS": "1"}, capture=True, timeout=timeout
        )
    assert outcome.status == 0, outcome.failure
    parts = re.split(r"^== (.*)$", outcome.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.timeout(400)
@requires(root=True, tools=["ip", "tc", "nsenter"])
def test_verbs_and_fsdp2() -> None:
    found = outputs("train", "local_steps", "fsdp2", "tensor_parallel")
    assert COMPRESSED in found["train"]
    assert "2 workers agree every 5 steps" in found["local_steps"]
    assert "weights are gathered in 8 bits" in found["fsdp2"]
    assert all(map(learned, (found["fsdp2"], found["tensor_parallel"])))


@pytest.mark.soak
@requires(root=True, tools=["ip", "tc", "nsenter"])
def test_compile_before_and_after_ddp() -> None:
    for text in outputs("compile", "compile after").values():
        assert learned(text)
        assert "compressing with Block(bits=4" in text


@pytest.mark.timeout(400)
@requires(root=True, tools=["ip", "tc", "nsenter"])
def test_accelerate_builds_ddp_and_it_is_compressed() -> None:
    (text,) = outputs("accelerate_loop").values()
    assert COMPRESSED in text


@pytest.mark.soak
@requires(root=True, tools=["ip", "tc", "nsenter"])
def test_lightning_and_transformers_build_ddp_and_it_is_compressed() -> None:
    found = outputs("lightning_fabric", "lightning_trainer", "transformers_trainer")
    assert len(found) == 3
    for name, text in found.items():
        assert COMPRESSED in text, name


@pytest.mark.soak
def test_ray_train(tmp_path: Path) -> None:
    """On a local Ray cluster; workers see no slow link, so what is shown is that the decision was taken there."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "ray_train.py")],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_raylet_start_wait_time_s": "180"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"loss \d", done.stdout), done.stdout
    assert "bottleneck" in done.stdout + done.stderr


@pytest.mark.soak
@requires(root=True, tools=["ip", "tc", "nsenter"])
def test_measure_plan_and_apply() -> None:
    (text,) = outputs("plan_and_apply", timeout=400).values()
    first, second = map(int, re.findall(r"shares \((\d+), (\d+)\)", text)[0])
    assert first + second == 8
    assert first > second


def test_precision_alone(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "precision.py"), run_name="__main__")
    assert learned(capsys.readouterr().out)


def test_examples_are_short_and_say_how_to_start_them() -> None:
    for path in sorted(EXAMPLES.glob("*.py")):
        if path.stem in LONGER:
            continue
        lines = path.read_text().splitlines()
        assert len(lines) <= 80, path.name
        if path.stem != "train":
            assert f"examples/{path.name}" in path.read_text().split('"""')[1], path.name


def test_the_readmes_script_is_an_example() -> None:
    assert (EXAMPLES / "train.py").read_text() in (ROOT / "README.md").read_text()
