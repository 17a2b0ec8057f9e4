"""Remove everything an emulation created: at its end, after its launcher was killed, or at the next start.

Several processes may clean up one job at the same time (the guardian and the next start, for example), so in each
step "already gone" counts as success.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from trimtab.emulate import mps
from trimtab.emulate.job_directory import inspection, is_alive, job_directories, jobs_home, recorded
from trimtab.environment import EMULATION

_TIMEOUT_S = 5.0


def sweep() -> list[str]:
    """Remove the leftovers of emulations whose launcher is dead; running ones are not touched.

    Returns the names of the jobs that were removed.
    """
    home = jobs_home()
    with inspection(home):
        dead = [path for path in job_directories(home) if not is_alive(path)]
    for path in dead:
        remove(path)
    return [path.name for path in dead]


def remove(path: Path) -> None:
    """Kill every process of the job in `path` and remove everything it created."""
    resources = recorded(path)
    kill_marked(path, spare=mps.PROCESSES)
    for kind, value in reversed(resources):
        if kind == "mps":
            mps.stop(Path(value))
    kill_marked(path)
    for kind, value in reversed(resources):
        if kind == "netns":
            _delete_namespace(value)
        elif kind == "cgroup":
            _delete_cgroup(Path(value))
    shutil.rmtree(path, ignore_errors=True)


def kill_marked(path: Path, variable: str = EMULATION, spare: tuple[str, ...] = ()) -> None:
    """SIGKILL every process of the job until none is left, except those whose name is in `spare`.

    Processes are identified by their environment, which child processes inherit, so this also finds those that
    changed their group, session or parent.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while (pids := marked(path, variable, spare)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def marked(path: Path, variable: str = EMULATION, spare: tuple[str, ...] = ()) -> list[int]:
    """The processes whose environment has `variable` set to `path`."""
    entry_bytes = f"{variable}={path}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if entry_bytes in (entry / "environ").read_bytes().split(b"\0") and not _spared(entry, spare):
                pids.append(int(entry.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    return pids


def _spared(entry: Path, spare: tuple[str, ...]) -> bool:
    command = (entry / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    return Path(command).name in spare


def _delete_namespace(name: str) -> None:
    # This also removes its interfaces, bridge and queues.
    if Path("/run/netns", name).exists():
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def _delete_cgroup(path: Path) -> None:
    # A killed process leaves its group with a short delay.
    deadline = time.monotonic() + _TIMEOUT_S
    while path.exists() and time.monotonic() < deadline:
        try:
            for child in path.iterdir():
                if child.is_dir():
                    child.rmdir()
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.01)
