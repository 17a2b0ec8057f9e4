"""Speed by duty cycle: stop and continue a rank many times a second. Does not need root.

Runs as ``python -m trimtab.emulate.throttling.duty_cycle STATE:SLOT:SHARING ...`` beside the ranks, and
reads each rank's process id and speed from its state file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trimtab.emulate.placement import Placement
from trimtab.emulate.throttling.rank_state import RankState

_PERIOD_S = 0.02
_MIN_RUN_S = 0.001


def start_duty_cycle(
    states: Sequence[tuple[Path, Placement]], env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the process that slows down these ranks."""
    targets = [f"{path}:{placement.slot}:{placement.sharing}" for path, placement in states]
    return subprocess.Popen(
        [sys.executable, "-m", "trimtab.emulate.throttling.duty_cycle", *targets],
        stdin=subprocess.DEVNULL,
        env=dict(env),
        start_new_session=True,
    )


def _cycle(state: RankState, slot: int, sharing: int) -> None:
    """Slow one rank down until it ends."""
    while not (pid := state.pid):
        time.sleep(_MIN_RUN_S)
    try:
        rank = os.pidfd_open(pid)  # a process id could be reused
        while True:
            part = state.speed / sharing
            if part >= 1:
                signal.pidfd_send_signal(rank, signal.SIGCONT)
                time.sleep(_PERIOD_S)
                continue
            period = max(_PERIOD_S, _MIN_RUN_S / part)
            # Ranks on one core share the clock and have different slots, so their turns do not overlap.
            now, offset = time.monotonic(), slot / sharing
            start = (int(now / period - offset) + 1 + offset) * period
            time.sleep(start - now)
            signal.pidfd_send_signal(rank, signal.SIGCONT)
            time.sleep(max(0.0, start + part * period - time.monotonic()))
            signal.pidfd_send_signal(rank, signal.SIGSTOP)
    except ProcessLookupError:
        return


def main() -> None:
    threads = []
    for target in sys.argv[1:]:
        path, slot, sharing = target.rsplit(":", 2)
        arguments = (RankState.open(Path(path)), int(slot), int(sharing))
        threads.append(threading.Thread(target=_cycle, args=arguments))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
