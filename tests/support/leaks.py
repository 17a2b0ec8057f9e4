"""What a test left behind in its process: a snapshot before, the differences after."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

MARK = "TRIMTAB_TEST_PROCESS"
"""Environment variable that finds descendants again after their parent died and init adopted them."""

_NOT_THE_TESTS = ("PYTEST_CURRENT_TEST", MARK, "TORCHINDUCTOR_", "TRITON_", "KMP_")
"""Variables (or how they begin) that pytest, torch and scikit-learn set by themselves when first used."""
_RESOURCE_TRACKER = "multiprocessing.resource_tracker"
_GRACE = 2.0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of this process that a test must hand back as it found it."""

    environment: dict[str, str]
    directory: str
    processes: frozenset[int]
    threads: frozenset[threading.Thread]
    torch: dict[str, object]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(
            environment=dict(os.environ),
            directory=str(Path.cwd()),
            processes=frozenset(descendants()),
            threads=frozenset(threading.enumerate()),
            torch=_torch_state(),
        )

    def leaks(self) -> list[str]:
        """What changed since, a line each; mends what it can so that the next test starts clean."""
        found = _environment(self.environment)
        if (directory := str(Path.cwd())) != self.directory:
            found.append(f"working directory: {self.directory} became {directory}")
            os.chdir(self.directory)
        found += _processes(self.processes)
        found += _threads(self.threads)
        if self.torch:
            now = _torch_state()
            for name in [name for name, old in self.torch.items() if now[name] != old]:
                found.append(f"torch {name}: {self.torch[name]} became {now[name]}")
                _restore_torch(name, self.torch[name])
        return found


def descendants() -> dict[int, str]:
    """Running processes that this one started, directly or not: process id to command line.

    Those whose parent died are adopted by an ancestor of ours, and known by the mark in their environment.
    Not counted are the services that multiprocessing starts once per process, and the pool's ranks.
    """
    parents = _parents()
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    me, server = os.getpid(), forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    line = [me]
    while (above := parents.get(line[-1], 0)) > 0:
        line.append(above)
    mark = f"{MARK}={os.environ.get(MARK)}".encode()
    adopted = [pid for above in line[1:] for pid in children.get(above, []) if pid not in line]
    todo = [*children.get(me, []), *(pid for pid in adopted if mark in _read(pid, "environ").split(b"\0"))]
    found: dict[int, str] = {}
    while todo:
        pid = todo.pop()
        if pid == server:
            continue
        todo += children.get(pid, [])
        command = _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
        if _RESOURCE_TRACKER not in command:
            found[pid] = command
    return found


def _parents() -> dict[int, int]:
    """Every process that is no zombie, and its parent."""
    parents = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - before and after every test: a Path each would be slow
        if name.isdigit() and (stat := _read(int(name), "stat")):
            state, parent = stat.rpartition(b")")[2].split()[:2]
            if state != b"Z":
                parents[int(name)] = int(parent)
    return parents


def _read(pid: int, name: str) -> bytes:
    """A file of a process; empty when it ended meanwhile, or belongs to someone else."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123 - see `_parents`
            return file.read()
    except OSError:
        return b""


def _environment(before: dict[str, str]) -> list[str]:
    found = []
    for name in sorted(before.keys() | os.environ.keys()):
        old, new = before.get(name), os.environ.get(name)
        if old != new and not name.startswith(_NOT_THE_TESTS):
            found.append(f"environment: {name} was {old!r} and is {new!r}")
            if old is None:
                del os.environ[name]
            else:
                os.environ[name] = old
    return found


def _processes(before: frozenset[int]) -> list[str]:
    left = _wait_until_gone(before)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if left:
        _wait_until_gone(before)
    return [f"process {pid} still running: {command}" for pid, command in left.items()]


def _wait_until_gone(before: frozenset[int]) -> dict[int, str]:
    """Processes that are new since `before` and still there after a moment of grace."""
    deadline = time.monotonic() + _GRACE
    while left := {pid: command for pid, command in descendants().items() if pid not in before}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def _threads(before: frozenset[threading.Thread]) -> list[str]:
    left = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    deadline = time.monotonic() + _GRACE
    for thread in left:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [f"thread still running: {thread.name}" for thread in left if thread.is_alive()]


def _torch_state() -> dict[str, object]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
        "gradient mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "default process group": torch.distributed.is_initialized(),
    }


def _restore_torch(name: str, value: Any) -> None:
    torch = sys.modules["torch"]
    if name == "default process group":
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return
    setters = {
        "default dtype": torch.set_default_dtype,
        "number of threads": torch.set_num_threads,
        "gradient mode": torch.set_grad_enabled,
        "autocast": partial(torch.set_autocast_enabled, "cpu"),
        "deterministic algorithms": torch.use_deterministic_algorithms,
    }
    setters[name](value)
