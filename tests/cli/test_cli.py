"""The command line: help without torch, mistakes in one line, statuses."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import trimtab

if TYPE_CHECKING:
    from pathlib import Path


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trimtab.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_version() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"trimtab {trimtab.__version__}\n")


@pytest.mark.parametrize(
    "arguments", [(), ("bench",), ("--help",), ("emulate", "--help"), ("bench", "ddp", "--help")]
)
def test_help(arguments: tuple[str, ...]) -> None:
    done = command(*arguments)
    assert done.returncode == 0
    assert "Usage" in done.stdout
    assert done.stderr == ""


def test_a_missing_torch_is_named() -> None:
    hide = "import sys; sys.modules['torch'] = None; from trimtab.cli import main; main(['bench', 'codec'])"
    done = subprocess.run(
        [sys.executable, "-c", hide], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "trimtab: the Python package 'torch' is missing; install it: pip install torch\n"


def test_mistakes_are_one_line_and_status_2(tmp_path: Path) -> None:
    cluster = tmp_path / "c.yaml"
    cluster.write_text(
        "version: 1\ndevices: {d: {kind: cpu, speed: 0}}\nhosts: [{name: a, devices: {d: 1}}]\n"
    )
    good = tmp_path / "good.yaml"
    good.write_text(cluster.read_text().replace("speed: 0", "speed: 1"))
    cases = {
        ("nonsense",): "No such command 'nonsense'",
        ("emulate", "none.yaml", "--", "x.py"): "none.yaml: cannot be read",
        ("emulate", str(cluster), "--", "x.py"): "devices.d.speed: should be greater than 0",
        ("emulate", str(good)): "no script; write: trimtab emulate",
        ("emulate", str(good), "--", str(tmp_path / "x.py")): "there is no script",
        ("emulate", str(good), "--throttle", "magic", "--", "x.py"): "magic",
        ("emulate", str(good), "--schedule", "soon", "--", "x.py"): "soon",
        ("run",): "no script",
    }
    for arguments, words in cases.items():
        done = command(*arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert words in done.stderr
        assert done.stderr.startswith("trimtab: ")
        assert len(done.stderr.splitlines()) == 1, done.stderr
