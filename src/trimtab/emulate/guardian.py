"""A process that outlives the launcher, to clean up if the launcher is killed.

Started as ``python -m trimtab.emulate.guardian JOB_DIRECTORY LAUNCHER_PID`` with a pipe from the launcher as standard
input. The launcher writes a byte after it has cleaned up; if it ends without that, the guardian cleans up.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from trimtab.emulate.cleanup import remove
from trimtab.emulate.job_directory import Job


class Guardian:
    """The launcher's side: start it before creating anything else, dismiss it after removing everything."""

    def __init__(self, job: Job) -> None:
        # In its own session, so that neither Ctrl-C nor a kill of the launcher's process group reaches it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trimtab.emulate.guardian", str(job.path), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        with suppress(BrokenPipeError):
            self._process.communicate(b"\n")


def main() -> None:
    path, launcher = Path(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    # A fork of the launcher may have inherited the pipe, which then is never closed.
    if os.getppid() == launcher:
        poll.register(os.pidfd_open(launcher), select.POLLIN)
    poll.poll()
    readable, _, _ = select.select([0], [], [], 0)
    if not (readable and os.read(0, 1)):
        remove(path)


if __name__ == "__main__":
    main()
