"""The processes of a chaos job: started, struck, waited for, and looked for afterwards."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from trimtab.bench.scenarios.chaos.faults import Strike
from trimtab.bench.scenarios.chaos.rank import start
from trimtab.bench.scenarios.chaos.training import JOBS
from trimtab.cluster import Link
from trimtab.emulate import Emulation
from trimtab.emulate.agents import free_port
from trimtab.emulate.cleanup import marked
from trimtab.errors import TrimtabError

HOSTS = "abcd"
PRELOAD = [
    *("torch", "torch._dynamo", "torch.utils.serialization", "torch.profiler._cupti_monitor"),
    *(
        "trimtab.bench.scenarios.chaos.rank",
        "trimtab.api.compress",
        "trimtab.api.loader",
        "trimtab.api.apply",
    ),
    *("trimtab.api.tensor_parallel", "trimtab.api.checkpoint"),
]
"""Imported once, before ranks are forked: the import of torch takes longer than a sequence."""

MARK = "TRIMTAB_CHAOS"
_GONE_S = 8.0
"""Seconds for what a killed rank started to notice it: a data worker looks every 5 s."""

_SLOW = Link(gbit_per_s=0.005)


class Ranks(ABC):
    """The ranks of one start of a job."""

    def __init__(self, spec: dict[str, Any], emulation: Emulation | None) -> None:
        self.spec, self.emulation = spec, emulation
        self.folder = Path(spec["folder"])
        self.count = JOBS[spec["job"]].ranks
        self.undone_at = 0.0
        self._undo: list[tuple[Callable[[list[int]], bool], Callable[[], None]]] = []

    @abstractmethod
    def start(self, *, port_in_use: bool) -> None: ...

    @abstractmethod
    def running(self) -> list[int]:
        """The ranks that have not ended."""

    @abstractmethod
    def statuses(self) -> list[int]:
        """How they ended."""

    @abstractmethod
    def strike(self, strike: Strike) -> bool:
        """Bring a fault about; returns False if there is nothing to strike (yet)."""

    @abstractmethod
    def kill(self) -> None:
        """End whatever still runs."""

    @abstractmethod
    def stacks(self) -> str:
        """Where the processes that still run are."""

    @abstractmethod
    def processes_left(self) -> list[int]: ...

    def failed(self) -> bool:
        return any(self.statuses())

    def events(self, rank: int) -> list[tuple[float, str]]:
        try:
            lines = (self.folder / f"events-{rank}").read_text().splitlines()
        except OSError:
            return []
        return [(float(moment), word) for moment, _, word in (line.partition(" ") for line in lines)]

    def time_of(self, rank: int, word: str) -> float | None:
        return next((moment for moment, each in self.events(rank) if each == word), None)

    def reached(self, rank: int, step: int) -> bool:
        """Whether a rank has done its steps before `step`."""
        done = [int(word.split()[1]) for _, word in self.events(rank) if word.startswith("step ")]
        return (bool(done) and max(done) >= step - 1) or (step == 0 and bool(self.events(rank)))

    def steps_after(self, moment: float, count: int) -> float | None:
        """When every rank had ended `count` steps since a moment."""
        ends = [
            [t for t, word in self.events(rank) if t > moment and word.startswith("step ")]
            for rank in range(self.count)
        ]
        return max(times[count - 1] for times in ends) if all(len(t) >= count for t in ends) else None

    def undo(self, running: list[int]) -> None:
        """Take faults back whose time is over."""
        for is_due, action in list(self._undo):
            if is_due(running):
                action()
                self._undo.remove((is_due, action))
                self.undone_at = time.monotonic()

    def log(self, rank: int) -> str:
        path = self.folder / f"rank-{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def complaints(self, struck: list[Strike]) -> list[str]:
        """What is wrong with how the ranks ended."""
        statuses = self.statuses()
        logs = "\n".join(self.log(rank) for rank in range(self.count))
        tail = f"; statuses {statuses}; the output ends in:\n{logs[-1500:]}"
        aborts = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGFPE, 134, 139}
        if aborts & set(statuses):
            return [f"a rank aborted{tail}"]
        if not any(statuses):
            return []
        ending = [strike.fault for strike in struck if strike.fault.ends]
        if not ending:
            return [f"ranks ended although nothing should have ended them{tail}"]
        if any(strike.fault.by == "launcher" for strike in struck) and self._finished():
            return [f"ranks went on to the end without their launcher{tail}"]
        if not all(re.search(fault.words, logs) for fault in ending):
            return [f"no rank says why it ended{tail}"]
        return []

    def _finished(self) -> bool:
        return any(word == "exit" for rank in range(self.count) for _, word in self.events(rank))

    def leaks(self) -> list[str]:
        """What is left behind, after a moment of grace."""
        deadline = time.monotonic() + _GONE_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in self.processes_left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left

    def _left(self) -> list[str]:
        temporary = [path for path in (self.folder / "tmp").rglob("*") if path.is_file()]
        shared = [
            name
            for name in os.listdir("/dev/shm")  # noqa: PTH208
            if any(f"_{pid}_" in name for pid in self.pids())
        ]
        return [
            *(f"process {pid} ({_command(pid)})" for pid in self.processes_left()),
            *(f"temporary file {path.name}" for path in temporary),
            *(f"shared segment {name}" for name in shared),
        ]

    def pids(self) -> list[int]:
        """The ranks' process ids, as far as they have told."""
        words = [word for rank in range(self.count) for _, word in self.events(rank)]
        return [int(word.split()[1]) for word in words if word.startswith("start ")]


class ForkedRanks(Ranks):
    """Ranks forked from a process that has imported torch, each on a host of its own where links are emulated."""

    def __init__(self, spec: dict[str, Any], emulation: Emulation | None) -> None:
        super().__init__(spec, emulation)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._processes: list[ForkServerProcess] = []
        self._statuses: dict[int, int] = {}

    def start(self, *, port_in_use: bool) -> None:
        # In a namespace of its own every port is free; a new one all the same, since the last may linger.
        self.spec["port"] = free_port()
        assert not port_in_use
        for rank in range(self.count):
            process = self._context.Process(target=start, args=(self.spec, rank), daemon=False)
            process.start()
            self._processes.append(process)

    def running(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if process.exitcode is None]

    def statuses(self) -> list[int]:
        return [process.exitcode or 0 for process in self._processes]

    def strike(self, strike: Strike) -> bool:
        name, process = strike.fault.name, self._processes[strike.rank]
        pid = process.pid or 0
        if process.exitcode is not None:
            return False
        if name in ("kill_rank", "bad_checkpoint"):
            os.kill(pid, signal.SIGKILL)
        elif name == "terminate":
            os.kill(pid, signal.SIGTERM)
        elif name == "interrupt":
            for each in self._processes:
                with suppress(ProcessLookupError):
                    os.kill(each.pid or 0, signal.SIGINT)
        elif name == "kill_worker":
            workers = [other for other in _session(pid) if other != pid]
            if not workers:
                return False
            os.kill(workers[0], signal.SIGKILL)
        elif name in ("stop", "stop_long"):
            os.kill(pid, signal.SIGSTOP)
            until = time.monotonic() + strike.fault.seconds
            long = name == "stop_long"
            self._undo.append(
                (
                    lambda running: running == [strike.rank] if long else time.monotonic() > until,
                    lambda: os.kill(pid, signal.SIGCONT),
                )
            )
        else:
            self._strike_link(strike)
        return True

    def _strike_link(self, strike: Strike) -> None:
        network = self.emulation.network if self.emulation is not None else None
        assert network is not None
        name, host = strike.fault.name, HOSTS[strike.rank]
        until = time.monotonic() + (strike.fault.seconds or float("inf"))
        if name == "slow_link":
            network.shape(host, _SLOW)
            action = lambda: network.shape(host)  # noqa: E731
        else:
            network.connect(host, False)
            action = lambda: network.connect(host, True)  # noqa: E731
        self._undo.append((lambda running: not running or time.monotonic() > until, action))

    def stacks(self) -> str:
        for rank in self.running():
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid or 0, signal.SIGCONT)
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"rank {rank}: {self.log(rank)[-1500:]}" for rank in self.running())

    def kill(self) -> None:
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
            process.join()
        self.undo([])

    def processes_left(self) -> list[int]:
        return [pid for process in self._processes for pid in _session(process.pid or 0)]


class LaunchedRanks(Ranks):
    """Ranks started by `trimtab run`."""

    _process: subprocess.Popen[bytes]

    def start(self, *, port_in_use: bool) -> None:
        self.started_at = time.monotonic()
        spec = self.folder / "spec.json"
        spec.write_text(json.dumps(self.spec))
        program = shutil.which(
            "trimtab", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        )
        if program is None:
            raise TrimtabError("bench chaos: there is no program `trimtab`; install trimtab with pip")
        run = [program, "run", "--nproc-per-node", str(self.count)]
        if port_in_use:
            taken = socket.create_server(("127.0.0.1", 0))
            self._undo.append((lambda running: not running, taken.close))
            run += ["--master-addr", "127.0.0.1", "--master-port", str(taken.getsockname()[1])]
        else:
            run.append("--standalone")
        with (self.folder / "rank-0.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*run, "-m", "trimtab.bench.scenarios.chaos.rank", str(spec)],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(self.folder / "tmp"),
                    MARK: str(self.folder),
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def running(self) -> list[int]:
        if self._process.poll() is None:
            return list(range(self.count))
        return list(range(len(marked(self.folder, MARK))))  # after the launcher its ranks have to end too

    def statuses(self) -> list[int]:
        return [self._process.returncode or 0]

    def strike(self, strike: Strike) -> bool:
        pids = self.pids()
        if self._process.poll() is not None or strike.rank >= len(pids):
            return False
        if strike.fault.name == "launcher_rank":
            os.kill(pids[strike.rank], signal.SIGKILL)
        elif strike.fault.name == "launcher_interrupt":
            os.killpg(self._process.pid, signal.SIGINT)
        else:
            self._process.send_signal(
                signal.SIGKILL if strike.fault.name == "launcher_kill" else signal.SIGTERM
            )
        return True

    def stacks(self) -> str:
        return ", ".join(f"{pid} ({_command(pid)})" for pid in self.processes_left())

    def kill(self) -> None:
        for pid in self.processes_left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self.undo([])

    def processes_left(self) -> list[int]:
        return marked(self.folder, MARK)


def _session(leader: int) -> list[int]:
    """The running processes of a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(entry.name))
    return found


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "ended"
