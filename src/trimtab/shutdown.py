"""Threads that leave before the interpreter does.

A thread that asks for the interpreter's lock while the interpreter is being torn down is unwound through C++ code
that must not throw, and the process aborts ("terminate called without an active exception"). So whatever owns a
thread registers here; at exit its threads are told to leave, and waited for, up to a limit.
"""

from __future__ import annotations

import atexit
import time
from typing import Protocol
from weakref import WeakSet

LIMIT_S = 5.0
"""How long exiting waits for all threads together; one that waits for a dead rank is left behind."""


class Closeable(Protocol):
    """Owns threads."""

    def close(self, timeout: float | None = None) -> None:
        """Tell the threads to leave, and wait for them up to `timeout` seconds; again is allowed."""


_open: WeakSet[Closeable] = WeakSet()


def close_at_exit(owner: Closeable) -> None:
    """Close `owner` when the process exits, if it still exists."""
    _open.add(owner)


@atexit.register
def _close_all() -> None:
    deadline = time.monotonic() + LIMIT_S
    for owner in list(_open):
        owner.close(max(deadline - time.monotonic(), 0.1))
