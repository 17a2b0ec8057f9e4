"""Events of the Chrome trace format, which chrome://tracing and ui.perfetto.dev show."""

from __future__ import annotations

from typing import Any


def interval(name: str, category: str, process: int, thread: int, start: float, end: float) -> dict[str, Any]:
    """Something that takes from `start` to `end`, in seconds."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": round(start * 1e6, 3),
        "dur": round(max(end - start, 0.0) * 1e6, 3),
    }


def label(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    """The name of a process or of a thread: `what` is "process_name" or "thread_name"."""
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
