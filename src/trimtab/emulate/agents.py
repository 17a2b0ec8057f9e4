"""The torchrun agents of one run: preconditions, waiting, termination, and what each of them runs.

``python -m trimtab.emulate.agents NODE TORCHRUN_ARGUMENTS`` is torchrun for one node; exit codes of failed ranks
go to a file in the run's directory.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trimtab.emulate.job_directory import EMULATION_RUN
from trimtab.emulate.outcome import any_report, exit_codes_path
from trimtab.emulate.rank_output import RankOutput
from trimtab.errors import TrimtabError

_POLL_S = 0.02
# After a failure: time for the other agents to report theirs, and then to stop.
_REPORT_S = 2.0
_STOP_S = 3.0


def wait(
    agents: Sequence[subprocess.Popen[Any]], run: Path, output: RankOutput, timeout: float | None
) -> None:
    """Wait until every agent has ended, or one has failed and the others had time to report."""
    started = time.monotonic()
    failed_at: float | None = None
    while any(agent.poll() is None for agent in agents):
        now = time.monotonic()
        if failed_at is None and (any(agent.poll() for agent in agents) or any_report(run)):
            failed_at = now
        if (failed_at is not None and now - failed_at > _REPORT_S) or output.broken:
            return
        if timeout is not None and now - started > timeout:
            raise TimeoutError(f"emulate: the run took longer than {timeout:g} s and was stopped")
        time.sleep(_POLL_S)


def stop(agents: Sequence[subprocess.Popen[Any]]) -> None:
    """Ask the agents to stop their ranks and themselves, and wait for them briefly."""
    running = [agent for agent in agents if agent.poll() is None]
    for agent in running:
        agent.terminate()
    deadline = time.monotonic() + _STOP_S
    for agent in running:
        with suppress(subprocess.TimeoutExpired):
            agent.wait(max(0.0, deadline - time.monotonic()))


def require_script(argv: Sequence[str]) -> None:
    """Raise if the command has no readable script."""
    if not argv or argv == ["-m"]:
        raise TrimtabError("emulate: no script to run; give a path and arguments, or -m and a module")
    if argv[0] != "-m" and not Path(argv[0]).is_file():
        raise TrimtabError(f"emulate: there is no script {argv[0]}; check the path")


def require_free(port: int) -> None:
    """Raise if another program listens on the port."""
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise TrimtabError(
                f"emulate: port {port} cannot be used: {error}; choose another, or none to use a free one"
            ) from None


def free_port() -> int:
    """A port on which no program listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(sys.argv[2:]))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        path = exit_codes_path(Path(os.environ[EMULATION_RUN]), int(sys.argv[1]))
        path.with_suffix(".tmp").write_text(json.dumps(codes))
        path.with_suffix(".tmp").rename(path)
        sys.exit(1)


if __name__ == "__main__":
    main()
