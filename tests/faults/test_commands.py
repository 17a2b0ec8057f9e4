"""Ctrl-C and SIGTERM in the midst of `trimtab probe` and `trimtab plan`: the old file stays, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.planning.planning import uneven

from trimtab.cluster import save_cluster
from trimtab.emulate.cleanup import marked

MARK = "TRIMTAB_FAULT_TEST"
MODEL = """
import pathlib, time, torch

class Stuck(torch.nn.Linear):
    def forward(self, x):
        pathlib.Path("stuck").touch()
        time.sleep(300)

def make():
    return torch.nn.Sequential(Stuck(8, 8)), (torch.ones(2, 8),)
"""
COMMANDS = {
    "probe": ["--model", "stuck_model:make", "--out", "out.json"],
    "plan": ["--cluster", "c.json", "--model", "stuck_model:make", "--batch-size", "12", "--out", "out.json"],
}


def interrupt(folder: Path, command: str, number: signal.Signals) -> tuple[int, str]:
    """Start a command, send the signal while the model runs; the exit status and standard error."""
    (folder / "stuck_model.py").write_text(MODEL)
    (folder / "out.json").write_text("precious")
    save_cluster(uneven(2.0), folder / "c.json")
    with subprocess.Popen(
        [sys.executable, "-m", "trimtab.cli", command, *COMMANDS[command]],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
            "TMPDIR": str(folder),
            "XDG_CACHE_HOME": str(folder / "cache"),
            MARK: str(folder),
        },
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 100
        while not (folder / "stuck").exists():
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    return process.returncode, errors


@pytest.mark.parametrize(
    ("command", "number", "status"),
    [
        ("plan", signal.SIGINT, 130),
        pytest.param("probe", signal.SIGINT, 130, marks=pytest.mark.soak),
        pytest.param("plan", signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.soak),
        pytest.param("probe", signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.soak),
    ],
)
def test_an_interrupted_command_leaves_the_old_file(
    tmp_path: Path, command: str, number: signal.Signals, status: int
) -> None:
    code, errors = interrupt(tmp_path, command, number)
    assert code == status, errors
    assert "Traceback" not in errors
    assert (tmp_path / "out.json").read_text() == "precious"
    assert marked(tmp_path, MARK) == []
    left = {path.name for path in tmp_path.iterdir()} - {"cache", "__pycache__", "torchinductor_root"}
    assert left == {"stuck_model.py", "out.json", "c.json", "stuck"}
