"""torchrun for one node of `trimtab run`: when ranks fail, the traceback of the first one is shown, and only that.

When they are started again, it says which was lost, and how.

python -m trimtab.cli.agent TORCHRUN_ARGUMENTS
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from trimtab.environment import ELASTIC, RESTART, RUN_FOLDER

_FOLDER = "trimtab-run-"
_PR_SET_PDEATHSIG = 1
_PEER_LOST = ("has another rank ended?", "by peer")
"""Words in the errors of ranks that lost another."""

_CONTINUES = (
    "training continues from the script's checkpoint; bits, error feedback and the plan continue if it loads them "
    "(trimtab.load_state_dict)"
)


def report_failure(text: str) -> bool:
    """Leave this rank's own account of its failure; False where nobody collects them."""
    directory = os.environ.get(RUN_FOLDER)
    if directory is None or not Path(directory).is_dir():
        return False
    path = Path(directory, f"{os.environ.get('RANK', '0')}.json")
    path.with_suffix(".part").write_text(json.dumps({"time": time.time(), "text": text}), encoding="utf-8")
    path.with_suffix(".part").replace(path)
    return True


def describe(error: BaseException, trace: TracebackType | None) -> str:
    """The traceback from the script's first frame on."""
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def main() -> None:
    """Exit with the status of the rank that failed first; 130 after Ctrl-C."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    if "LOGLEVEL" not in os.environ and "TORCH_LOGS" not in os.environ:
        # It repeats for every rank what the first failure says better.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    arguments = parse_args(sys.argv[1:])
    end_with_parent(signal.SIGTERM)
    directory = _make_folder()
    os.environ[RUN_FOLDER] = str(directory)
    fewest, _, most = str(arguments.nnodes).partition(":")
    os.environ[ELASTIC] = str(int(most not in ("", fewest)))
    announce_restarts(directory)
    try:
        run(arguments)
        status = 0
    except ChildFailedError as error:
        rank, text, status = _first_failure(error.failures, directory)
        if status == 128 + signal.SIGKILL:
            text += "; the system may have run out of memory"
        others = f" (and {len(error.failures) - 1} more after it)" if len(error.failures) > 1 else ""
        print(f"trimtab: rank {rank} failed{others}:\n{text}", file=sys.stderr)
    except RendezvousError as error:
        status = 1
        print(f"trimtab: {_describe_rendezvous(arguments, error)}", file=sys.stderr)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except SignalException as error:
        status = 128 + error.sigval
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    sys.exit(status)


def end_with_parent(number: signal.Signals) -> None:
    """Have the system send this process a signal when its parent ends, however suddenly (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _make_folder() -> Path:
    """A folder for the ranks of this node, locked as long as this process lives; those of dead ones are removed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with suppress(OSError):
            other = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(other)
                # A new one may not be locked yet.
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > 60:
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(other)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
    return folder


def _describe_rendezvous(arguments: Any, error: Exception) -> str:
    endpoint = arguments.rdzv_endpoint or "the rendezvous"
    return (
        f"run: the nodes could not meet at {endpoint}: {error or type(error).__name__}; the node that hosts it must "
        "stay, and a job that has ended needs a new --rdzv-id"
    )


def announce_restarts(directory: Path) -> None:
    """From here on, a line on standard error says why this node's ranks are started again."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    from trimtab.collectives.shared_segment import remove_abandoned

    monitor, restart = LocalElasticAgent._monitor_workers, LocalElasticAgent._restart_workers
    failures: dict[int, Any] = {}

    @functools.wraps(monitor)
    def monitor_and_remember(self: Any, group: Any) -> Any:
        result = monitor(self, group)
        failures.clear()
        failures.update(result.failures)
        return result

    @functools.wraps(restart)
    def announce_and_restart(self: Any, group: Any) -> None:
        trace = ""
        if failures:
            rank, text, status = _first_failure(failures, directory)
            if any(words in text for words in _PEER_LOST):
                text = "it lost another rank"
            trace = f"\n{text}" if "\n" in text else ""
            most = group.spec.max_restarts
            number = most - self._remaining_restarts
            cause = f"restart {number} of {most} after rank {rank} {'was lost' if status > 128 else 'failed'}"
            cause = f"{cause}: {_headline(text)}"
        else:
            cause = "restart after nodes joined"
        os.environ[RESTART] = cause
        print(f"trimtab: {cause}; {_CONTINUES}{trace}", file=sys.stderr, flush=True)
        for report in directory.glob("*.json"):
            report.unlink()
        before = group.workers[0].world_size
        restart(self, group)
        remove_abandoned()
        now = group.workers[0].world_size
        if now != before and group.group_rank == 0:
            print(f"trimtab: {now} ranks now, {before} before", file=sys.stderr, flush=True)

    LocalElasticAgent._monitor_workers = monitor_and_remember  # type: ignore[method-assign]
    LocalElasticAgent._restart_workers = announce_and_restart  # type: ignore[method-assign]


def _headline(text: str) -> str:
    """The line of a traceback that names the error."""
    lines = text[text.rfind("Traceback (most recent call last):") + 1 :].splitlines()
    line = next((line for line in lines[1:] if line and not line.startswith(" ")), lines[0])
    return line if len(line) <= 200 else f"{line[:200]}..."


def _first_failure(failures: dict[int, Any], directory: Path) -> tuple[int, str, int]:
    """The failure that brought the others about: its rank, what happened, and the exit status for it.

    A rank that dies of a signal cannot report it, and those left waiting for it do: so signals come first, then
    the earliest report.
    """
    codes = {rank: failure.exitcode for rank, failure in failures.items()}
    reports = {int(path.stem): json.loads(path.read_text()) for path in directory.glob("*.json")}
    killed = [
        r for r, code in sorted(codes.items()) if code < 0 and -code not in (signal.SIGTERM, signal.SIGPIPE)
    ]
    if killed:
        rank, number = killed[0], -codes[killed[0]]
        name = signal.Signals(number).name if number in set(signal.Signals) else signal.strsignal(number)
        text = f"ended by signal {number} ({name or 'of the system'})"
    elif reports:
        rank = min(reports, key=lambda rank: reports[rank]["time"])
        text = reports[rank]["text"]
    else:
        rank = min(codes)
        text = f"exited with status {codes[rank]}"
    code = codes.get(rank, 1)
    return rank, text, 128 - code if code < 0 else code or 1


if __name__ == "__main__":
    main()
