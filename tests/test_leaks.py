"""The checks on the test process itself: what a test leaves behind fails it, by name, and is put right."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.support.leaks import Snapshot
from tests.support.requirements import requires

ROOT = Path(__file__).parents[1]


def test_nothing_left_is_no_leak() -> None:
    assert Snapshot.take().leaks() == []


def test_environment_is_named_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "old")
    before = Snapshot.take()
    os.environ["ADDED"] = "1"
    os.environ["KEPT"] = "new"
    assert before.leaks() == [
        "environment: ADDED was None and is '1'",
        "environment: KEPT was 'old' and is 'new'",
    ]
    assert "ADDED" not in os.environ
    assert os.environ["KEPT"] == "old"


def test_working_directory_is_named_and_restored(tmp_path: Path) -> None:
    before, here = Snapshot.take(), Path.cwd()
    os.chdir(tmp_path)
    assert before.leaks() == [f"working directory: {here} became {tmp_path}"]
    assert Path.cwd() == here


@pytest.mark.parametrize("command", ["exec sleep 301", "sleep 301 >/dev/null 2>&1 & exit"])
def test_process_is_named_and_killed_even_when_its_parent_is_gone(command: str) -> None:
    before = Snapshot.take()
    child = subprocess.Popen(["sh", "-c", command])
    if "&" in command:
        child.wait()
    (leak,) = before.leaks()
    assert leak.endswith("still running: sleep 301")
    child.wait()
    assert Snapshot.take().processes == before.processes


def test_thread_is_named() -> None:
    before, end = Snapshot.take(), threading.Event()
    thread = threading.Thread(target=end.wait, name="straggler")
    thread.start()
    try:
        assert before.leaks() == ["thread still running: straggler"]
    finally:
        end.set()
        thread.join()


def test_torch_settings_are_named_and_restored() -> None:
    before = Snapshot.take()
    threads = torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(threads + 1)
    assert len(before.leaks()) == 2
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_num_threads() == threads


def test_leak_fails_the_test_that_left_it(tmp_path: Path) -> None:
    conftest = tmp_path / "conftest.py"
    conftest.write_text(
        "from tests.conftest import *\nfrom tests.conftest import _environment, _leaves_nothing_behind\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import os\ndef test_leaky(): os.environ['LEFT'] = '1'\ndef test_clean(): assert 'LEFT' not in os.environ\n"
    )
    outcome = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert outcome.returncode == 1
    assert "test_it.py::test_leaky left behind:\nenvironment: LEFT was None and is '1'" in outcome.stdout
    assert "2 passed, 1 error" in outcome.stdout


def test_requirement_that_is_missing_is_the_reason_printed() -> None:
    mark = requires(modules=["no_such_module", "os"], tools=["no-such-command", "sh"])
    assert mark.args == (True,)
    assert mark.kwargs["reason"] == "needs the module no_such_module, the command no-such-command"
    assert requires(modules=["os"], tools=["sh"]).args == (False,)
