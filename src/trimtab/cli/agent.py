"""torchrun for one node of `trimtab run`: when ranks fail, the traceback of the first one is shown, and only that.

python -m trimtab.cli.agent TORCHRUN_ARGUMENTS
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

FAILURES = "TRIMTAB_RUN_FAILURES"
"""Environment variable: the directory in which the ranks of this node report how they failed."""


def report_failure(text: str) -> bool:
    """Leave this rank's own account of its failure; False where nobody collects them."""
    directory = os.environ.get(FAILURES)
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
    from torch.distributed.run import parse_args, run

    if "LOGLEVEL" not in os.environ and "TORCH_LOGS" not in os.environ:
        # It repeats for every rank what the first failure says better.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    directory = tempfile.mkdtemp(prefix="trimtab-run-")
    os.environ[FAILURES] = directory
    try:
        run(parse_args(sys.argv[1:]))
        status = 0
    except ChildFailedError as error:
        status = _explain(error.failures, Path(directory))
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except SignalException as error:
        status = 128 + error.sigval
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    sys.exit(status)


def _explain(failures: dict[int, Any], directory: Path) -> int:
    """Print the failure that brought the others about; returns the exit status of its rank.

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
        text = f"ended by signal {number} ({signal.Signals(number).name})"
        if number == signal.SIGKILL:
            text += "; the system may have run out of memory"
    elif reports:
        rank = min(reports, key=lambda rank: reports[rank]["time"])
        text = reports[rank]["text"]
    else:
        rank = min(codes)
        text = f"exited with status {codes[rank]}"
    others = f" (and {len(codes) - 1} more after it)" if len(codes) > 1 else ""
    print(f"trimtab: rank {rank} failed{others}:\n{text}", file=sys.stderr)
    code = codes.get(rank, 1)
    return 128 - code if code < 0 else code or 1


if __name__ == "__main__":
    main()
