"""What `trimtab run` starts on each rank: wraps DDP's constructor, then runs the unchanged script.

It also registers the backend "trimtab", so that the script may use it by name.

python -m trimtab.cli.bootstrap [--settings JSON] SCRIPT ARGS
python -m trimtab.cli.bootstrap [--settings JSON] -m MODULE ARGS
"""

from __future__ import annotations

import atexit
import functools
import os
import runpy
import signal
import sys
import threading
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trimtab import backend, environment
from trimtab.cli.agent import describe, end_with_parent, report_failure
from trimtab.errors import TrimtabError
from trimtab.model_state import JobBound
from trimtab.report import events
from trimtab.run_settings import OwnSteps, RunSettings
from trimtab.selector import selected

if TYPE_CHECKING:
    from types import TracebackType


class _Script:
    """What is known of the script."""

    has_ddp = False
    """Whether it has made a DistributedDataParallel."""


def take_over_ddp(settings: RunSettings) -> None:
    """From here on every new DistributedDataParallel is compressed where that pays, or runs as the plan says.

    With `local_steps` it takes those instead.

    A communication hook that the script registers takes precedence: trimtab's hook then passes every bucket to it.
    """
    from torch.nn.parallel import DistributedDataParallel

    from trimtab.api.compress import compress
    from trimtab.api.local_steps import local_steps
    from trimtab.control.autopilot.pilot import start_autopilot
    from trimtab.control.compression.bucket_caps import bucket_options
    from trimtab.control.compression.ddp import compression_of
    from trimtab.control.compression.explanation import record_explanation
    from trimtab.control.plans.applying import apply_launch_plan, launch_bucket_cap_mb
    from trimtab.control.running_local_steps import local_steps_of
    from trimtab.control.step_recorder import observe_backward, record_steps
    from trimtab.measure.products import refuse_wrong_products

    if events.active():
        observe_backward()
    every, adjust = settings.local_steps, selected(settings.adjust)
    construct, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    @functools.wraps(construct)
    def construct_and_compress(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        if OwnSteps.running:
            construct(self, *args, **kwargs)
            return
        _Script.has_ddp = True
        given = signature(construct).bind(self, *args, **kwargs).arguments
        cap = launch_bucket_cap_mb()
        if cap is not None and "bucket_cap_mb" not in given:
            kwargs["bucket_cap_mb"] = cap
        elif "bits" in adjust and every is None:
            kwargs |= bucket_options(given)
        construct(self, *args, **kwargs)
        record_steps(self)
        refuse_wrong_products(next(self.parameters()).device)  # DDP has at least one
        if every is not None:
            rounds: Any = every if every == "auto" else int(every)
            try:
                local_steps(self, every=rounds, max_penalty=settings.max_penalty)
                return
            except TrimtabError as error:
                if every != "auto":
                    raise
                environment.logger().warning("%s; gradients are exchanged in every step", error)
        if not apply_launch_plan(self) and "bits" in adjust:
            try:
                compress(self)
            except TrimtabError as error:  # nobody asked for it in so many words: the script goes on without
                record_explanation(self, f"gradients are sent as by plain DDP: {error}")
        compression = compression_of(self)
        if compression is not None:
            compression.automatic = True
        if settings.auto:
            start_autopilot(self, adjust if settings.batch_sizes == "auto" else adjust - {"shares"})

    @functools.wraps(register)
    def register_or_defer(self: DistributedDataParallel, state: object, hook: Any) -> None:
        compression, local = compression_of(self), local_steps_of(self)
        own = isinstance(getattr(hook, "__self__", None), JobBound)
        if compression is not None and compression.automatic:
            compression.defer_to(state, hook)
        elif own or local is None or not local.defer(state, hook):
            register(self, state, hook)

    DistributedDataParallel.__init__ = construct_and_compress  # type: ignore[method-assign]
    DistributedDataParallel.register_comm_hook = register_or_defer  # type: ignore[method-assign]


def take_over_plan(settings: RunSettings) -> None:
    """The launcher's plan is the one that models are run under and loaders follow."""
    if settings.plan is not None:
        from trimtab.control.plans.active_plan import LaunchPlan

        LaunchPlan.path = Path(settings.plan)
        LaunchPlan.adjust = selected(settings.adjust)


def take_over_batches(settings: RunSettings) -> None:
    """The script's batches are cut among the ranks; a plan has shares of its own."""
    planned = settings.plan is not None
    if "shares" in selected(settings.adjust) and not planned and settings.batch_sizes != "equal":
        from trimtab.control.shares.launch import cut_batches

        cut_batches(settings.batch_sizes)


TAKE_OVERS = (take_over_plan, take_over_ddp, take_over_batches)
"""What is done before the script runs, in this order. Each looks at the settings and imports what it needs."""


def take_over_process(settings: RunSettings) -> None:
    """All of it, once for a process, and not with TRIMTAB_DISABLE=1."""
    if environment.disabled() or RunSettings.in_force is not None:
        return
    RunSettings.in_force = settings
    for take_over in TAKE_OVERS:
        take_over(settings)


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
    if RunSettings.in_force is None or not several or not events.is_first_rank() or _Script.has_ddp:
        return
    if selected(settings.adjust) and settings.batch_sizes in ("auto", "equal"):
        environment.logger().warning(
            "run: the script made no DistributedDataParallel, so `trimtab run` has adjusted nothing by itself"
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
