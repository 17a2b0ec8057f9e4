"""A thread of low priority on each rank: on rank 0 it decides and publishes, elsewhere it fetches."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from collections.abc import Callable

_FAILED = "failed"

NICENESS = 10
"""Added to the thread's: it takes what the training leaves."""


class Background:
    """Decisions by key, the same on every rank, through the job's own store.

    The store is the one the ranks met at; keys carry the name of the group, which is the job's own.
    No collective is involved, so nothing here can get into the order of those that are.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # A connection of its own: waiting for a key must not hold up others who use the store.
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = PrefixStore(f"trimtab/adaptive/{group.group_name}", store.clone())
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._published: list[str] = []
        self.cpu_seconds = 0.0

    def decide(self, key: str, function: Callable[[], dict[str, Any]]) -> Future[dict[str, Any]]:
        """Run `function` and publish what it gives, which must be JSON's."""

        def run() -> dict[str, Any]:
            try:
                text = json.dumps(function())
            except Exception as error:
                # The others wait for this key: tell them, rather than let them wait for the store's timeout.
                self._store.set(key, json.dumps({_FAILED: repr(error)}))
                raise
            self._store.set(key, text)
            # Everyone has read the one before last: it was in effect before this one was begun.
            self._published.append(key)
            if len(self._published) > 2:
                self._store.delete_key(self._published.pop(0))
            return dict(json.loads(text))

        return self._submit(run)

    def fetch(self, key: str) -> Future[dict[str, Any]]:
        """What the deciding rank publishes under the key."""

        def run() -> dict[str, Any]:
            decision = dict(json.loads(self._store.get(key)))
            if _FAILED in decision:
                raise RuntimeError(f"rank 0 could not plan the bits of the layers: {decision[_FAILED]}")
            return decision

        return self._submit(run)

    @staticmethod
    def done(value: dict[str, Any]) -> Future[dict[str, Any]]:
        """A decision that is known already."""
        future: Future[dict[str, Any]] = Future()
        future.set_result(value)
        return future

    def close(self) -> None:
        """End the thread when it has done what it was given; a key that never comes is not waited for."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=5)

    def _submit(self, function: Callable[[], dict[str, Any]]) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="trimtab-adaptive", daemon=True)
            self._thread.start()
        self._queue.put((function, future))
        return future

    def _serve(self) -> None:
        if sys.platform == "linux":  # elsewhere this would set the whole process's
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (item := self._queue.get()) is not None:
            function, future = item
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
            self.cpu_seconds = time.thread_time()
