"""Nothing is left of an emulation, however its launcher ends, and live ones are not touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.emulate.machines import jobs_of, resources_of, traces, until
from tests.support.requirements import requires

from trimtab.emulate import sweep
from trimtab.emulate.cleanup import marked
from trimtab.emulate.job_directory import is_alive
from trimtab.errors import TrimtabError

pytestmark = requires(root=True, tools=["ip", "tc", "nsenter"])

_PRELUDE = """
import sys, time
from tests.emulate.machines import pair
from trimtab.emulate import Emulation, emulate
cluster = pair(speed=0.4, gbit_per_s=1.0, memory_gib=2.0)
"""
_RUNNING = _PRELUDE + "sys.exit(emulate(cluster, ['-m', 'tests.emulate.sleeper']))"
_IDLE = (
    _PRELUDE
    + """
with Emulation(cluster) as emulation:
    emulation.start("a", ["sleep", "1000"])
    print("ready", flush=True)
    time.sleep(1000)
"""
)


class _Launcher:
    """A process that holds an emulation with links, quota and memory limits, and has said that it is ready."""

    def __init__(self, program: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        (self.job,) = jobs_of(self.process.pid)
        self.resources = resources_of(self.job)
        assert {kind for kind, _ in self.resources} == {"netns", "cgroup"}
        assert marked(self.job)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        # Not to the end of its output: what it started may hold that open.
        with self.process:
            return self.process.wait(timeout=60)

    def traces(self) -> list[str]:
        return traces(self.job, self.resources)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_run_and_leave_nothing(number: signal.Signals, status: int) -> None:
    launcher = _Launcher(_RUNNING)
    assert launcher.end(number) == status
    assert launcher.traces() == []


def test_kill_of_the_launcher_ends_its_ranks() -> None:
    launcher = _Launcher(_RUNNING)
    assert len(marked(launcher.job)) >= 4  # two agents, two ranks
    assert launcher.end(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: launcher.traces() == [], seconds=20)


def test_the_next_start_sweeps_dead_jobs_only() -> None:
    """With the guardian killed too, what is left goes at the next start, and a live job next to it stays."""
    dead, live = _Launcher(_IDLE), _Launcher(_IDLE)
    assert {value for _, value in dead.resources}.isdisjoint({value for _, value in live.resources})
    os.kill(_guardian_of(dead.process.pid), signal.SIGKILL)
    dead.end(signal.SIGKILL)
    assert len(dead.traces()) == 1 + len(dead.resources) + len(marked(dead.job))
    before = live.traces()
    assert dead.job.name in sweep()
    assert dead.traces() == []
    assert is_alive(live.job)
    assert live.traces() == before
    live.end(signal.SIGINT)
    assert live.traces() == []


def _guardian_of(launcher: int) -> int:
    for entry in Path("/proc").glob("[0-9]*"):
        if b"trimtab.emulate.guardian" in (entry / "cmdline").read_bytes():
            parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if int(parent) == launcher:
                return int(entry.name)
    raise AssertionError("the launcher has no guardian")


def test_a_link_in_the_place_of_the_jobs_folder_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a shared temporary folder anybody can put one there, to have another person's files removed."""
    treasure = tmp_path / "home" / "1234-0123abcd"
    treasure.mkdir(parents=True)
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / f"trimtab-{os.getuid() + 1}").symlink_to(tmp_path / "home")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(TrimtabError, match="symbolic link"):
        sweep()
    assert treasure.is_dir()


def test_only_job_directories_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.emulate.cleanup.jobs_home", lambda: tmp_path)
    for name in ("1234-0123abcd", "thesis", "1234-0123abcd.bak"):
        (tmp_path / name).mkdir()
    (tmp_path / "77-89abcdef").symlink_to(tmp_path / "thesis")
    assert sweep() == ["1234-0123abcd"]
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == [
        "1234-0123abcd.bak",
        "77-89abcdef",
        "thesis",
    ]
