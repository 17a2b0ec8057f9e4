"""The process that torchrun starts for each rank: applies the rank's limits, then runs the user's script.

Runs as ``python -m trimtab.emulate.worker SCRIPT ARGS`` or ``... -m MODULE ARGS``. The script runs as it would under
Python and needs no changes.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import runpy
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from trimtab.emulate.job_directory import EMULATION_RUN
from trimtab.emulate.rank_output import STREAMS, pipe_path
from trimtab.emulate.throttling.cgroups import cpus, set_quota
from trimtab.emulate.throttling.rank_state import RankSettings, RankState, state_path
from trimtab.emulate.throttling.schedule import speed_left
from trimtab.environment import DEVICE_CLASS, RUN_FOLDER
from trimtab.errors import TrimtabError


def main() -> None:
    run, rank = Path(os.environ[EMULATION_RUN]), int(os.environ["RANK"])
    _redirect_output(run, rank)
    settings, state = RankSettings.load(run, rank), RankState.open(state_path(run, rank))
    os.environ[DEVICE_CLASS] = settings.device
    _throttle = _apply_limits(settings, state, state_path(run, rank))
    if settings.kind == "cuda":
        _check_gpu(rank)
    status = 0
    try:
        _run_script(sys.argv[1:])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status != 0:
            text = end.code if isinstance(end.code, str) else f"exited with status {status}"
            _report_failure(rank, status, text)
    except BaseException as error:
        status = 1
        trace = _without_ours(error.__traceback__)
        _report_failure(rank, status, "".join(traceback.format_exception(type(error), error, trace)))
    _leave(status)


def _check_gpu(rank: int) -> None:
    """End this rank if its part of the GPU computes wrong products."""
    import torch

    from trimtab.measure.products import refuse_wrong_products

    try:
        refuse_wrong_products(torch.device("cuda"))
    except TrimtabError as error:
        _report_failure(rank, 2, f"emulate: {error}")
        _leave(2)


def _leave(status: int) -> None:
    """End the process as Python does, but without finalizing the interpreter.

    Gloo's threads may outlive the script, even if it destroyed its groups. If they need the interpreter while it is
    being finalized, the process aborts at the end of a successful run.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _redirect_output(run: Path, rank: int) -> None:
    for number, name in enumerate(STREAMS, start=1):
        pipe = os.open(pipe_path(run, rank, name), os.O_WRONLY)
        os.dup2(pipe, number)
        os.close(pipe)
    # torchrun disables buffering, which would interleave parts of lines of different ranks.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _apply_limits(settings: RankSettings, state: RankState, path: Path) -> object:
    """Apply memory limit, cores and speed; the returned object must be kept alive for as long as they apply."""
    if settings.memory is not None:
        settings.memory.join()
    os.sched_setaffinity(0, settings.cores)
    # Importing torch is not part of the emulation, so it happens at full speed.
    from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

    if settings.memory_fraction is not None:
        import torch

        torch.cuda.set_per_process_memory_fraction(settings.memory_fraction)
    throttle: object = None
    if settings.quota is not None:
        settings.quota.join()
    if settings.throttle == "competitor":
        from trimtab.emulate.throttling.competitor import start_competitors

        start_competitors(path, settings.cores)
    elif settings.throttle == "gemm":
        from trimtab.emulate.throttling.repeated_products import RepeatedProducts

        throttle = RepeatedProducts(state, settings.kind)

    counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        counts[optimizer] = counts.get(optimizer, 0) + 1
        # A script with several optimizers takes one step with each of them.
        if counts[optimizer] > state.steps:
            state.steps = counts[optimizer]
            _set_speed(settings, state)

    register_optimizer_step_post_hook(count)
    state.pid = os.getpid()
    return throttle


def _set_speed(settings: RankSettings, state: RankState) -> None:
    """Follow the schedule: called after each step, before the next."""
    speed = settings.speed * speed_left(settings.schedule, state.steps)
    if speed != state.speed:
        state.speed = speed
        if settings.quota is not None and settings.throttle != "gemm":
            set_quota(settings.quota, cpus(speed, len(settings.cores), settings.sharing), len(settings.cores))


def _run_script(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path[0] = str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """The traceback, starting at the script's first frame."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _report_failure(rank: int, status: int, text: str) -> None:
    """Write a failure to a file, for the launcher to show."""
    path = Path(os.environ[RUN_FOLDER], f"{rank}.json")
    report = {"time": time.time(), "status": status, "text": text}
    path.with_suffix(".tmp").write_text(json.dumps(report))
    path.with_suffix(".tmp").rename(path)


if __name__ == "__main__":
    main()
