"""Speed by competition: busy processes on the rank's cores take the rest of their time.

Runs as ``python -m trimtab.emulate.throttling.competitor STATE CORE ...``, started by the rank itself: the kernel
divides a core between sessions and control groups first, so a competitor must be in those of the rank.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from trimtab.emulate.throttling.rank_state import RankState

_POLL_S = 0.005
_NICE_STEP = 1.25  # ratio of CPU time between neighboring levels of niceness
_MAX_NICE = 19


def start_competitors(state: Path, cores: tuple[int, ...]) -> None:
    """Start, from inside a rank, the process that manages its competitors; it ends with the rank."""
    subprocess.Popen(
        [sys.executable, "-m", "trimtab.emulate.throttling.competitor", str(state), *map(str, cores)],
        stdin=subprocess.DEVNULL,
    )


def niceness(speed: float) -> list[int]:
    """The niceness of each competitor that together leave a process of niceness 0 that part of a core."""
    whole, rest = divmod(1 / speed - 1, 1)
    levels = [0] * int(whole)
    if rest > _NICE_STEP ** -(_MAX_NICE + 0.5):
        levels.append(round(-math.log(rest, _NICE_STEP)))
    return levels


def _compete(core: int, nice: int, manager: int) -> None:
    """Keep a core busy until the manager is gone."""
    os.sched_setaffinity(0, [core])
    os.nice(nice)
    while os.getppid() == manager:
        for _ in range(100_000):
            pass


def main() -> None:
    rank, me = os.getppid(), os.getpid()
    state, cores = RankState.open(Path(sys.argv[1])), [int(core) for core in sys.argv[2:]]
    speed = 1.0
    busy: list[int] = []
    while os.getppid() == rank:
        if state.speed != speed:
            speed = state.speed
            for pid in busy:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            busy = []
            for core in cores:
                for nice in niceness(speed):
                    if (pid := os.fork()) == 0:
                        _compete(core, nice, me)
                        os._exit(0)
                    busy.append(pid)
        time.sleep(_POLL_S)
    for pid in busy:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
