"""A pool of worker ranks that serves the whole test session.

The ranks are real processes, forked from a server that has imported torch already, so the import is paid once
and a replacement costs milliseconds. Every call gets a fresh default process group over Gloo on 127.0.0.1
with exactly as many ranks as asked for: no group, store key or sequence number outlives the call.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.worker import Answer, Job, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

MOST_RANKS = 8
_ECHO = 3.0
"""Seconds that the other ranks get to fail too after the first one did, before they count as hanging."""
_LOG_TAIL = 4000
_PRELOAD = ["pytest", "torch", "torch._dynamo"]
"""Imported once before any rank is forked; the first DistributedDataParallel would import the last."""


class RanksError(AssertionError):
    """At least one rank raised, died, hung or leaked; the message shows every such rank, the cause first."""


@dataclass
class _Rank:
    process: ForkServerProcess
    connection: Connection


class Pool:
    """Forks ranks when a call needs them and keeps them until a call fails or the session ends."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._directory = Path(tempfile.mkdtemp(prefix="trimtab-ranks-"))
        self._ranks: list[_Rank] = []
        self._store: Any = None
        self._calls = itertools.count()

    def __call__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout: float = 60.0,
        faults: Sequence[object] = (),
        allow_groups: bool = False,
    ) -> list[Any]:
        """Run `function(*arguments)` on ranks 0 to `world_size` - 1 and return their results in order.

        The function is sent by name, so it must be at the top of a module; arguments and results are pickled.
        Inside, the default process group is initialised and torchrun's RANK, WORLD_SIZE, LOCAL_RANK and
        LOCAL_WORLD_SIZE are set. `faults` (see `tests.support.faults`) are injected into the default group
        and those made from it. Groups that the function makes must be destroyed by it, unless `allow_groups`.

        Raises `RanksError` when a rank raises, dies, leaks, or is not done after `timeout` seconds; the
        ranks are then replaced.
        """
        assert 1 <= world_size <= MOST_RANKS, f"the pool has 1 to {MOST_RANKS} ranks, not {world_size}"
        call = pickle.dumps((function, arguments))
        self._grow(world_size)
        job = Job(
            call=call,
            faults=pickle.dumps(tuple(faults)),
            world_size=world_size,
            port=self._store.port,
            prefix=f"call-{next(self._calls)}",
            timeout=timeout,
            allow_groups=allow_groups,
        )
        deadline = time.monotonic() + timeout
        ranks = self._ranks[:world_size]
        try:
            answers = self._exchange(ranks, pickle.dumps(job), deadline)
            self._exchange(ranks, pickle.dumps(None), deadline)
        except BaseException:  # also the per-test timeout and Ctrl-C: ranks in an unknown state serve nobody
            self.discard()
            raise
        return [pickle.loads(answer.result) for answer in answers]

    def discard(self) -> None:
        """Kill every rank; the next call forks new ones."""
        for rank in self._ranks:
            rank.process.kill()
            rank.connection.close()
        for rank in self._ranks:
            rank.process.join()
            rank.process.close()
        self._ranks.clear()

    def close(self) -> None:
        """Kill every rank and remove the pool's files."""
        self.discard()
        shutil.rmtree(self._directory)

    def _grow(self, world_size: int) -> None:
        if self._store is None:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(len(self._ranks), world_size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=serve, args=(theirs, rank, self._directory, self._environment), name=f"rank-{rank}"
            )
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours))

    def _exchange(self, ranks: list[_Rank], message: bytes, deadline: float) -> list[Answer]:
        """Send one message to all, collect one answer from each."""
        for rank in ranks:
            with suppress(BrokenPipeError):  # it died; collecting says how
                rank.connection.send_bytes(message)
        answers: dict[int, Answer] = {}
        failures: dict[int, tuple[float, str]] = {}
        while len(answers) + len(failures) < len(ranks) and (left := deadline - time.monotonic()) > 0:
            open_ranks = [i for i in range(len(ranks)) if i not in answers and i not in failures]
            ready = wait([ranks[i].connection for i in open_ranks], timeout=left)
            for i in open_ranks:
                if ranks[i].connection not in ready:
                    continue
                try:
                    answer: Answer = pickle.loads(ranks[i].connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    ranks[i].process.join()
                    failures[i] = (time.monotonic(), f"died with exit code {ranks[i].process.exitcode}")
                else:
                    if answer.error:
                        failures[i] = (answer.at, f"failed:\n{answer.error}")
                    else:
                        answers[i] = answer
            if failures:
                deadline = min(deadline, time.monotonic() + _ECHO)
        if failures or len(answers) < len(ranks):
            hanging = [i for i in range(len(ranks)) if i not in answers and i not in failures]
            for i in hanging:
                failures[i] = (time.monotonic(), f"not done in time, and was here:\n{self._stack(i)}")
            raise RanksError(self._report(failures, len(ranks)))
        return [answers[i] for i in range(len(ranks))]

    def _stack(self, rank: int) -> str:
        """What the rank's threads are doing now."""
        path = self._directory / f"{rank}.stack"
        os.kill(self._ranks[rank].process.pid or 0, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and not path.stat().st_size:
            time.sleep(0.02)
        time.sleep(0.05)
        return path.read_text() or "(it did not answer a request for its stack)"

    def _report(self, failures: dict[int, tuple[float, str]], world_size: int) -> str:
        lines = ["failed ranks, the first to fail first"]
        for i, (_, what) in sorted(failures.items(), key=lambda item: item[1][0]):
            lines.append(f"--- rank {i} of {world_size} {what.rstrip()}")
            log = (self._directory / f"{i}.log").read_text(errors="replace").strip()
            if log:
                lines.append(f"--- rank {i} printed\n{log[-_LOG_TAIL:]}")
        return "\n".join(lines)
