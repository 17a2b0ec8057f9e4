"""A replayed step in the Chrome trace format: open it at ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.chrome_trace import interval, label
from trimtab.predict.replay.inputs import RoleWork
from trimtab.predict.replay.timeline import Timeline

WIRE = 0
"""The process that represents the link; roles are numbered from 1."""


def trace(timeline: Timeline, roles: Sequence[RoleWork] = ()) -> dict[str, Any]:
    """The trace as a JSON tree. With the replayed roles, compute lanes show every operator."""
    events: list[dict[str, Any]] = [label("process_name", WIRE, 0, "link")]
    for index, role in enumerate(timeline.roles):
        ranks = f" x {role.ranks}" if role.ranks > 1 else ""
        events.append(label("process_name", index + 1, 0, f"{role.name}{ranks}"))
        events.append(label("thread_name", index + 1, 0, "compute"))
    named: set[tuple[int, int]] = set()
    for span in timeline.spans:
        process = WIRE if span.role is None else span.role + 1
        thread = 0 if span.lane == "compute" else 1 + span.stage
        if span.lane != "compute" and (process, thread) not in named:
            named.add((process, thread))
            events.append(label("thread_name", process, thread, f"{span.lane}, stage {span.stage}"))
        events.append(interval(span.name, span.phase, process, thread, span.start, span.end))
    for index, replayed in enumerate(roles):
        events += _operators(index, replayed, timeline)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(path: str | Path, timeline: Timeline, roles: Sequence[RoleWork] = ()) -> None:
    """Write the trace to a file."""
    Path(path).write_text(json.dumps(trace(timeline, roles)), encoding="utf-8")


def _operators(index: int, role: RoleWork, timeline: Timeline) -> list[dict[str, Any]]:
    """Operators inside the runs of a compute lane, at the speed each run had."""
    lane = [s for s in timeline.spans if s.role == index and s.lane == "compute" and s.phase != "optimizer"]
    work, times = [0.0], [0.0]
    for span in lane:
        before = work[-1]
        whole = span.ticks[0][1] if span.ticks else 0.0
        for moment, left in (*span.ticks, (span.end, 0.0)):
            work.append(before + whole - left)
            times.append(moment)
    events, done = [], 0.0
    for segment in role.segments:
        if segment.seconds > 0:
            start, end = _at(done, work, times), _at(done + segment.seconds, work, times)
            events.append(interval(segment.name, segment.phase, index + 1, 0, start, end))
        done += segment.seconds
    return events


def _at(done: float, work: list[float], times: list[float]) -> float:
    """When so much work was done."""
    place = min(max(1, bisect_right(work, done)), len(work) - 1)
    low, high = work[place - 1], work[place]
    part = min(1.0, (done - low) / (high - low)) if high > low else 0.0
    return times[place - 1] + part * (times[place] - times[place - 1])
