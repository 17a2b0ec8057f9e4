"""What one rank of the pool does: run functions inside a fresh default process group, one after another.

Each call is a conversation of two steps, so that no rank tears its group down while another still uses it:

1. the pool sends a `Job`; the rank initialises the default group, runs the function, answers an `Answer`;
2. when all have answered, the pool sends None; the rank destroys its groups, looks for leaks, answers again.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tests.support.leaks import MARK, Snapshot
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call: which function, on how many ranks, meeting where."""

    call: bytes
    """Pickled (function, arguments); unpickled by the rank with its errors caught: it may import a module."""
    faults: bytes
    """Pickled tuple of faults to inject into the default group; empty for plain Gloo."""
    world_size: int
    port: int
    prefix: str
    timeout: float
    allow_groups: bool


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of one step on one rank."""

    result: bytes = b""
    """The pickled result of the function."""
    error: str = ""
    """The rank's traceback, or what it leaked; empty when all is well."""
    at: float
    """When it ended, by the machine's monotonic clock: the earliest failure is the cause of the others."""


def serve(connection: Connection, rank: int, directory: Path, environment: dict[str, str]) -> None:
    """Serve the pool until its end of the connection closes."""
    _die_with_the_pool()
    os.environ.clear()
    os.environ.update(environment, **{MARK: f"rank-{os.getpid()}"})
    log = os.open(directory / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stacks = (directory / f"{rank}.stack").open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    torch.set_num_threads(1)
    gc.freeze()  # what was imported before the fork: collecting it again costs 100 ms a call
    while True:
        try:
            job: Job | None = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        assert job is not None
        _answer_one(connection, rank, job)


def _die_with_the_pool() -> None:
    """Even when the pool is killed while this rank is stuck in a collective.

    The server that forked this rank ends when nobody holds the other end of its pipe any more; multiprocessing
    gives every rank a copy of that end, for processes of its own, so let go of it and follow the server.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer_one(connection: Connection, rank: int, job: Job) -> None:
    before = Snapshot.take()
    try:
        result = pickle.dumps(_run(rank, job))
    except BaseException:
        # Say so first: destroying the group may block, and the peers' errors that follow are only echoes.
        connection.send_bytes(pickle.dumps(Answer(error=traceback.format_exc(), at=time.monotonic())))
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    connection.send_bytes(pickle.dumps(Answer(result=result, at=time.monotonic())))
    del result
    connection.recv_bytes()
    try:
        found = _tear_down(job) + before.leaks()
        error = "".join(f"left behind: {line}\n" for line in found)
    except BaseException:
        error = traceback.format_exc()
    connection.send_bytes(pickle.dumps(Answer(error=error, at=time.monotonic())))


def _run(rank: int, job: Job) -> Any:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.world_size))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(job.world_size))
    torch.manual_seed(0)
    faults = pickle.loads(job.faults)
    backend = "gloo"
    if faults:
        from tests.support.faults import install

        backend = install(faults)
    timeout = timedelta(seconds=job.timeout)
    store = TCPStore("127.0.0.1", job.port, is_master=False, timeout=timeout)
    dist.init_process_group(
        backend,
        store=PrefixStore(job.prefix, store),
        rank=rank,
        world_size=job.world_size,
        timeout=timeout,
    )
    function, arguments = pickle.loads(job.call)
    return function(*arguments)


def _tear_down(job: Job) -> list[str]:
    """Destroy every group; name those that the function should have destroyed itself."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    gc.collect()
    found = []
    if dist.is_initialized():
        world = dist.distributed_c10d._world
        names = sorted(name for group, name in world.pg_names.items() if group is not world.default_pg)
        if names and not job.allow_groups:
            found.append(
                f"process groups {names} still registered; destroy them or call ranks(..., allow_groups=True)"
            )
        dist.destroy_process_group()
    return found
