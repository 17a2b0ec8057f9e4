"""The torchrun agents of one run: waiting for them, ending them, and what they need to start."""

from __future__ import annotations

import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.emulate.outcome import any_account
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.emulate.rank_output import RankOutput

_LOOK_S = 0.02
# After a failure: for the other agents to report what their ranks died of, and then to end them.
_REPORT_S = 2.0
_END_S = 3.0


def wait(
    agents: Sequence[subprocess.Popen[Any]], run: Path, output: RankOutput, timeout: float | None
) -> None:
    """Until every agent has ended, or one has failed and the others had time to say so."""
    started = time.monotonic()
    failed_at: float | None = None
    while any(agent.poll() is None for agent in agents):
        now = time.monotonic()
        if failed_at is None and (any(agent.poll() for agent in agents) or any_account(run)):
            failed_at = now
        if (failed_at is not None and now - failed_at > _REPORT_S) or output.broken:
            return
        if timeout is not None and now - started > timeout:
            raise TimeoutError(f"emulate: the run took longer than {timeout:g} s and was ended")
        time.sleep(_LOOK_S)


def end(agents: Sequence[subprocess.Popen[Any]]) -> None:
    """Ask the agents to end their ranks and themselves, and give them a moment to."""
    living = [agent for agent in agents if agent.poll() is None]
    for agent in living:
        agent.terminate()
    deadline = time.monotonic() + _END_S
    for agent in living:
        with suppress(subprocess.TimeoutExpired):
            agent.wait(max(0.0, deadline - time.monotonic()))


def require_script(argv: Sequence[str]) -> None:
    """Refuse a command without a script that can be read."""
    if not argv or argv == ["-m"]:
        raise TrimtabError("emulate: no script to run; give its path and arguments, or -m and a module")
    if argv[0] != "-m" and not Path(argv[0]).is_file():
        raise TrimtabError(f"emulate: there is no script {argv[0]}; check the path")


def require_free(port: int) -> None:
    """Refuse a port that another program listens on."""
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise TrimtabError(
                f"emulate: port {port} cannot be used: {error}; name another, or none to take a free one"
            ) from None


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
