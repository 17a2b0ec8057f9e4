"""Stops threads before the interpreter exits.

A thread that requests the GIL while the interpreter is shutting down is unwound through C++ code that must not
throw, and the process aborts ("terminate called without an active exception"). So objects that own threads
register here; at exit their threads are stopped, with a limit on the time.
"""

from __future__ import annotations

import atexit
import time
from typing import Protocol
from weakref import WeakSet

LIMIT_S = 5.0
"""How long exiting waits for all threads together; a thread that waits for a dead rank is abandoned."""


class Closeable(Protocol):
    """Owns threads."""

    def close(self, timeout: float | None = None) -> None:
        """Stop the threads, waiting up to `timeout` seconds; may be called again."""


_open: WeakSet[Closeable] = WeakSet()


def close_at_exit(owner: Closeable) -> None:
    """Close `owner` when the process exits, if it still exists."""
    _open.add(owner)


@atexit.register
def _close_all() -> None:
    deadline = time.monotonic() + LIMIT_S
    for owner in list(_open):
        owner.close(max(deadline - time.monotonic(), 0.1))
