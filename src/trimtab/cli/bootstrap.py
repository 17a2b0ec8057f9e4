"""What `trimtab run` starts on each rank: takes over what may be adjusted, then runs the unchanged script.

It also registers the backend "trimtab", so that the script may use it by name.

python -m trimtab.cli.bootstrap [--settings JSON] SCRIPT ARGS
python -m trimtab.cli.bootstrap [--settings JSON] -m MODULE ARGS
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trimtab import backend, environment
from trimtab.cli.agent import describe, end_with_parent, report_failure
from trimtab.cli.take_overs import Script, take_over_process
from trimtab.errors import TrimtabError
from trimtab.report import events
from trimtab.run_settings import RunSettings
from trimtab.selector import selected

if TYPE_CHECKING:
    from types import TracebackType


def main() -> NoReturn:
    """Run the script named on the command line as `__main__`, and leave."""
    end_with_parent(signal.SIGKILL)
    backend.register()
    arguments = sys.argv[1:]
    settings = RunSettings.take_from(arguments)
    sys.argv[1:] = arguments
    status = 0
    try:
        take_over_process(settings)
        _run_script()
    except SystemExit as exit_:
        status = _status(exit_.code)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BaseException as error:
        status, hint = 1, ""
        text = f"{error}" if isinstance(error, TrimtabError) else describe(error, _from_script(error))
        if isinstance(error, Exception) and (hint := _hint(error)):
            text += f"\n\n{hint}"
        if not report_failure(text):
            sys.excepthook(type(error), error, error.__traceback__)
            print(hint, file=sys.stderr)
    if status == 0:
        _say_if_unused(settings)
    elif (launch := sys.modules.get("trimtab.control.shares.launch")) is not None:
        launch.script_failed()
    _leave(status)


def _run_script() -> None:
    if sys.argv[1] == "-m":
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


def _say_if_unused(settings: RunSettings) -> None:
    """One line at the end of a job of several ranks that had nothing to adjust."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if RunSettings.in_force is None or not several or not events.is_first_rank() or Script.is_wrapped:
        return
    if selected(settings.adjust) and settings.batch_sizes in ("auto", "equal"):
        environment.logger().warning(
            "run: the script trained no DistributedDataParallel or FSDP2 module, so `trimtab run` has adjusted nothing "
            "by itself"
        )


def _status(code: object) -> int:
    """As the interpreter has it: a message goes to standard error."""
    status = code if isinstance(code, int) else int(code is not None)
    text = f"exited with status {status}" if isinstance(code, int) else str(code)
    if status and not report_failure(text) and not isinstance(code, int):
        print(code, file=sys.stderr)
    return status


def _hint(error: Exception) -> str:
    """What else may have caused an error of the script: sizes that it took for granted."""
    if isinstance(error, TrimtabError) or "trimtab.control.shares.takeover" not in sys.modules:
        return ""
    from trimtab.control.shares.takeover import Takeover

    shares = None if Takeover.current is None else Takeover.current.shares
    if shares is None or len(set(shares)) == 1:
        return ""
    return (
        f"trimtab: batches were uneven at that time, of {environment.listed_by_rank(shares)} samples on the ranks; if "
        f"the script needs {sum(shares) // len(shares)} in every batch, use --batch-sizes equal"
    )


def _from_script(error: BaseException) -> TracebackType | None:
    """The traceback without the frames that are ours."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _leave(status: int) -> NoReturn:
    """Exit as the interpreter does, up to the point where it is torn down.

    While that goes on, Gloo's own thread may free the tensors of its last operation, for which it needs the
    interpreter's lock: one exit in ten then ends in an abort, with plain DDP too.
    """
    events.close(status)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
