"""When `trimtab run` is killed, its ranks end too; a port that is taken is named."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trimtab.emulate.cleanup import marked

MARK = "TRIMTAB_FAULT_TEST"
SLEEPER = (
    "import os, pathlib, sys, time\npathlib.Path(sys.argv[1], os.environ['RANK']).touch()\ntime.sleep(300)"
)


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    script = folder / "train.py"
    script.write_text(SLEEPER)
    (folder / "tmp").mkdir()
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "trimtab.cli",
            "run",
            "--nproc-per-node",
            "2",
            *flags,
            str(script),
            str(folder),
        ],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, MARK: str(folder), "TMPDIR": str(folder / "tmp")},
    )


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        pytest.param("launcher", signal.SIGKILL, id="launcher killed"),
        pytest.param("agent", signal.SIGKILL, id="agent killed", marks=pytest.mark.soak),
        pytest.param("launcher", signal.SIGTERM, id="launcher terminated", marks=pytest.mark.soak),
    ],
)
def test_ranks_do_not_outlive_their_launcher(tmp_path: Path, victim: str, number: signal.Signals) -> None:
    process = start(tmp_path)
    with process:
        deadline = time.monotonic() + 100
        while not all((tmp_path / rank).exists() for rank in "01"):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (agent,) = [pid for pid in marked(tmp_path, MARK) if b"trimtab.cli.agent" in command(pid)]
        os.kill(process.pid if victim == "launcher" else agent, number)
        process.wait(timeout=60)
        while left := marked(tmp_path, MARK):
            assert time.monotonic() < deadline + 60, [command(pid) for pid in left]
            time.sleep(0.05)
        assert files_in(tmp_path / "tmp") == []


def command(pid: int) -> bytes:
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_bytes().replace(b"\0", b" ") if path.exists() else b""


@pytest.mark.soak
def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(tmp_path, "--master-addr", "127.0.0.1", "--master-port", str(port))
        _, errors = process.communicate(timeout=100)
    assert process.returncode != 0
    assert str(port) in errors
    assert "in use" in errors
    assert marked(tmp_path, MARK) == []
