"""One rank of a chaos job: it trains, saves, resumes, reports where it is, and suffers the faults from inside.

Forked from a process that has imported torch already, or started by `trimtab run` as

    python -m trimtab.bench.scenarios.chaos.rank SPEC_FILE
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from trimtab.bench.scenarios.chaos.training import JOBS, SAVE_EVERY, STEPS, Job
from trimtab.codec import Block
from trimtab.collectives import layout

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1


def start(spec: Mapping[str, Any], rank: int) -> None:
    """The forked process: becomes a rank on its host, with its output in a file."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:  # otherwise the server would live as long as this rank
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = Path(spec["folder"])
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if spec["namespaces"]:
        enter_namespace(spec["namespaces"][rank])
    os.environ.update(
        MASTER_ADDR=spec["address"],
        MASTER_PORT=str(spec["port"]),
        GLOO_SOCKET_IFNAME=spec["interface"],
        TRIMTAB_LOG="warning",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(JOBS[spec["job"]].ranks),
        LOCAL_WORLD_SIZE=str(JOBS[spec["job"]].ranks),
        TMPDIR=str(folder / "tmp"),
    )
    tempfile.tempdir = None
    status = 1
    try:
        train(spec)
        status = 0
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BaseException:
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr)
    # As `trimtab run` ends a rank: everything but the interpreter's own teardown.
    with suppress(KeyboardInterrupt):
        atexit._run_exitfuncs()
    os._exit(status)


def enter_namespace(name: str) -> None:
    """Let this thread, and those that it starts, see the network of an emulated host."""
    with Path(f"/run/netns/{name}").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {name}")


class Reporter:
    """Tells the driver what this rank has reached, through a file: a time and a word in each line."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = os.open(folder / f"events-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, word: str) -> None:
        os.write(self._file, f"{time.monotonic()} {word}\n".encode())


def train(spec: Mapping[str, Any]) -> None:
    """The script of a user who saves checkpoints and repeats a step with non-finite gradients."""
    rank, folder = int(os.environ["RANK"]), Path(spec["folder"])
    report = Reporter(folder, rank)
    faults = [fault for fault in spec["inner"] if fault["rank"] == rank]
    settings = _settings(faults, folder, report)
    report(f"start {os.getpid()}")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=spec["timeout_s"]))
    job = JOBS[spec["job"]](spec, settings)
    first = resume(job, folder / "checkpoints", report)
    batches = job.batches(first)
    for step in range(first, STEPS):
        loss_of = next(batches)
        due = {fault["name"] for fault in faults if fault["step"] == step}
        for name in due & {"clock_jump", "out_of_memory"}:
            report(f"fault {name}")
            _clock_jump() if name == "clock_jump" else _run_out_of_memory()
        with _slowed(job, rank == job.ranks - 1 and spec["slow_from"] <= step):
            _step(job, loss_of, due, report)
        report(f"step {step}")
        time.sleep(spec["pause_s"])
        if (step + 1) % SAVE_EVERY == 0:
            full = [fault for fault in faults if fault["name"] == "disk_full" and fault["step"] <= step]
            for fault in full[:1]:
                report("fault disk_full")
                faults.remove(fault)
            checkpoint(job, folder / "checkpoints", step + 1, report, full=bool(full))
    result = {"digests": job.digests(), "adjustments": job.adjustments()}
    (folder / f"result-{rank}.json").write_text(json.dumps(result))
    report("exit")
    dist.barrier()
    dist.destroy_process_group()


def _step(job: Job, loss_of: Any, due: set[str], report: Reporter) -> None:
    """One step; again with the same batch if a gradient is not finite, as GradScaler would skip it."""
    for attempt in range(2):
        job.optimizer.zero_grad()
        spoil = attempt == 0 and bool(due & {"nan", "inf"})
        if spoil:
            name = "nan" if "nan" in due else "inf"
            report(f"fault {name}")
            handle = job.slowed.register_forward_hook(lambda _m, _i, out, v=float(name): out * v)
        loss = loss_of()
        loss.backward()
        if spoil:
            handle.remove()
        gradients = [p.grad for p in job.module.parameters() if p.grad is not None]
        if "wrong_gradient" in due:  # the canary: this rank's copy goes its own way
            report("fault wrong_gradient")
            torch._foreach_neg_(gradients)
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            break
        report("repeat")
    job.optimizer.step()


@contextmanager
def _slowed(job: Job, slow: bool) -> Iterator[None]:
    handle = job.slowed.register_forward_hook(lambda *_: time.sleep(job.late())) if slow else None
    yield
    if handle is not None:
        handle.remove()


def checkpoint(job: Job, home: Path, step: int, report: Reporter, *, full: bool = False) -> None:
    """Save into a new folder, which gets its name when all ranks are done; keeps the last two."""
    part = home / f"{step}.part"
    report("checkpoint")
    problem = ""
    try:
        part.mkdir(parents=True, exist_ok=True)
        with _no_room() if full else nullcontext():
            job.save(part)
    except (Exception, CheckpointException) as error:  # the second is not one of the first
        problem = f"{type(error).__name__}: {error}"
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if dist.get_rank() == 0:
        if any(problems):
            print(f"step {step}: no checkpoint, the last one is kept: {problems}", file=sys.stderr)
            shutil.rmtree(part, ignore_errors=True)
        else:
            shutil.rmtree(home / str(step), ignore_errors=True)  # one that could not be read
            part.rename(home / str(step))
            for old in saved(home)[:-2]:
                shutil.rmtree(home / str(old))
    dist.barrier()
    report("saved")


def resume(job: Job, home: Path, report: Reporter) -> int:
    """The first step to do, from the newest checkpoint that every rank can read."""
    for step in reversed(saved(home)):
        problem = ""
        try:
            job.load(home / str(step))
        except (Exception, CheckpointException) as error:
            problem = f"{type(error).__name__}: {error}"
        problems: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        if not any(problems):
            report(f"resumed {step}")
            return step
        report(f"unreadable {step}")
        print(f"checkpoint {step} cannot be read, trying an older one: {problems}", file=sys.stderr)
    return 0


def saved(home: Path) -> list[int]:
    """The steps of the whole checkpoints."""
    names = [path.name for path in home.iterdir()] if home.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())


def _settings(faults: list[dict[str, Any]], folder: Path, report: Reporter) -> dict[str, Any]:
    """What this rank is given that the others are not."""
    names = {fault["name"] for fault in faults if fault["at_start"]}
    for name in names:
        report(f"fault {name}")
    settings: dict[str, Any] = {}
    if "other_codec" in names:
        settings["codec"] = Block(bits=2)
    if "other_seed" in names:
        settings["compress_seed"] = 7
    if "other_plan" in names:
        settings["plan_samples"] = 4
    if "other_version" in names:
        layout.WIRE_VERSION += 1
    if "disabled_rank" in names:
        os.environ["TRIMTAB_DISABLE"] = "1"
    if "log_full" in names:
        (folder / "log").symlink_to("/dev/full")
        settings["log"] = folder / "log"
    return settings


def _clock_jump() -> None:
    """The wall clock of this process is a day off from here on."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() - 86400.0
    time.time_ns = lambda: now_ns() - 86400 * 10**9


def _run_out_of_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    torch.empty(1 << 30)


@contextmanager
def _no_room() -> Iterator[None]:
    """No file of this process can grow beyond a few hundred bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text()))
