"""A low-priority thread on each rank: on rank 0 it makes decisions and publishes them, elsewhere it fetches them."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from trimtab.collectives.groups import shared_name
from trimtab.collectives.roll_call import roll_call, timeout_of
from trimtab.errors import TrimtabError
from trimtab.shutdown import close_at_exit

FAILED = "failed"
"""The key of a decision that failed; its value is the error."""

POLL_S = 0.02
"""Seconds between polls for a decision, which takes effect some steps later."""

NICENESS = 10
"""Added to the thread's niceness, so that training comes first."""


class Background:
    """Decisions by key, the same on every rank, through the job's own store.

    The store is that of the rendezvous; keys have a unique prefix, on which the ranks agree in the constructor.
    Only the constructor is collective.
    """

    def __init__(self, group: dist.ProcessGroup, tensor_group: dist.ProcessGroup | None = None) -> None:
        """Rank 0 of `group` decides; of several such groups, that of the first rank of `tensor_group`."""
        name = shared_name(group)
        if tensor_group is not None:
            name = roll_call(tensor_group, "trimtab-decisions", name)[0]
        # A connection of its own: waiting for a key must not block other users of the store.
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = PrefixStore(f"{name}/decisions", store.clone())
        self._timeout_s = timeout_of(group).total_seconds()
        self._closing = threading.Event()
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._published: list[str] = []
        self._unanswered = False
        """Whether the thread waits for a store that does not answer."""
        self.cpu_seconds = 0.0

    def decide(self, key: str, function: Callable[[], dict[str, Any]]) -> Future[dict[str, Any]]:
        """Run `function` and publish its result, which must be JSON; if it raises, publish the error as `FAILED`.

        A failed decision must never end a training that could continue without it.
        """

        def run() -> dict[str, Any]:
            try:
                text = json.dumps(function())
            except Exception as error:
                text = json.dumps({FAILED: f"{type(error).__name__}: {error}"})
            self._store.set(key, text)
            # Every rank has read the one before last: it took effect before this one was started.
            self._published.append(key)
            if len(self._published) > 2:
                self._store.delete_key(self._published.pop(0))
            return dict(json.loads(text))

        return self._submit(run)

    def fetch(self, key: str) -> Future[dict[str, Any]]:
        """What rank 0 publishes under the key."""

        def run() -> dict[str, Any]:
            deadline = time.monotonic() + self._timeout_s
            while not self._store.check([key]):  # a thread inside `get` could not be stopped
                if self._closing.wait(POLL_S):
                    raise RuntimeError(f"closed before rank 0 decided {key!r}")
                if time.monotonic() > deadline:
                    raise TrimtabError(
                        f"rank 0 of the group has not published {key!r} within {self._timeout_s:g} s: has it ended?"
                    )
            return dict(json.loads(self._store.get(key)))

        return self._submit(run)

    def wait(self, decision: Future[dict[str, Any]]) -> dict[str, Any]:
        """The decision, within the group's timeout: over a link that was cut, the thread's question to the store has
        no answer and no end."""
        try:
            return decision.result(self._timeout_s)
        except FutureTimeoutError:
            self._unanswered = True
            raise TrimtabError(
                f"the job's store has not answered within {self._timeout_s:g} s; can its host, that of rank 0, "
                "still be reached?"
            ) from None

    @staticmethod
    def done(value: dict[str, Any]) -> Future[dict[str, Any]]:
        """A decision that is already known."""
        future: Future[dict[str, Any]] = Future()
        future.set_result(value)
        return future

    def close(self, timeout: float | None = 5.0) -> None:
        """Stop the thread after its current work; it does not wait for a key that never comes."""
        self._closing.set()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(0 if self._unanswered else timeout)

    def _submit(self, function: Callable[[], dict[str, Any]]) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="trimtab-adaptive", daemon=True)
            self._thread.start()
            close_at_exit(self)
        self._queue.put((function, future))
        return future

    def _serve(self) -> None:
        if sys.platform == "linux":  # elsewhere this would change the whole process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (item := self._queue.get()) is not None:
            function, future = item
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
            self.cpu_seconds = time.thread_time()
