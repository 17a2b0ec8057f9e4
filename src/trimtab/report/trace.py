"""A measured step in the Chrome trace format, all ranks on one clock: open it at ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.chrome_trace import interval, label
from trimtab.errors import TrimtabError
from trimtab.report.events import to_json
from trimtab.report.run_folder import Run, is_number
from trimtab.strict_files import replace_file

LANES = ("compute", "optimizer", "data", "wait", "codec", "wire")
"""Rows of a rank, from top to bottom; codec and wire have one for each stage."""

PREDICTED = 10_000
"""Added to the rank's number: the process in which its predicted step is shown."""


def traced_steps(run: Run) -> list[int]:
    """The steps whose spans are recorded on some rank."""
    return sorted({event["step"] for event in run.events("trace") if isinstance(event.get("step"), int)})


def write_trace(run: Run, path: str | Path, *, step: int | None = None) -> int:
    """Write the trace of the recorded step that is nearest to `step`; returns which one that is.

    Args:
        step: by default the number in the file's name (`step120.json`), or the last recorded step.

    Raises:
        TrimtabError: no step is recorded, or the file cannot be written.
    """
    steps = traced_steps(run)
    if not steps:
        raise TrimtabError(
            f"{run.folder}: no step is traced: steps 5, 10, 20, 50, 100, ... are, and this run has fewer"
        )
    if step is None:
        number = re.search(r"(\d+)\D*$", Path(path).stem)
        step = int(number[1][:15]) if number else steps[-1]
    nearest = min(steps, key=lambda traced: (abs(traced - step), traced))
    replace_file(path, to_json(chrome_trace(run, nearest)) + "\n")
    return nearest


def chrome_trace(run: Run, step: int) -> dict[str, Any]:
    """The spans of a step on every rank, and below them the predicted step of each rank, if a plan is in force."""
    traces = {event["rank"]: event for event in run.events("trace") if event["step"] == step}
    begins = [event["began"] for event in traces.values() if is_number(event.get("began"))]
    origin = min(begins, default=0.0)
    events: list[dict[str, Any]] = []
    for rank, event in sorted(traces.items()):
        host = str(run.ranks[rank].start.get("host", ""))
        events.append(label("process_name", rank, 0, f"rank {rank}" + (f" ({host})" if host else "")))
        events.append({"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}})
        spans = event.get("spans")
        if is_number(event.get("began")) and isinstance(spans, list):
            events += _rank_events(rank, event["began"] - origin, spans)
    shifts = {rank: e["began"] - origin for rank, e in traces.items() if is_number(e.get("began"))}
    events += _predicted(run, step, shifts)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"step": step, "run": run.folder.name, "script": run.info.get("script")},
    }


def _rank_events(rank: int, shift: float, spans: list[Any]) -> list[dict[str, Any]]:
    events, named = [], set()
    for span in spans:
        if not (isinstance(span, list) and len(span) == 4 and is_number(span[2]) and is_number(span[3])):
            continue
        lane, name, start, end = str(span[0]), str(span[1]), float(span[2]), float(span[3])
        stage = re.search(r"stage (\d)", name)
        thread = 10 * (LANES.index(lane) if lane in LANES else len(LANES)) + (int(stage[1]) if stage else 0)
        if thread not in named:
            named.add(thread)
            events.append(label("thread_name", rank, thread, f"{lane}, stage {stage[1]}" if stage else lane))
        events.append(interval(name, lane, rank, thread, shift + start, shift + end))
    return events


def _predicted(run: Run, step: int, begins: Mapping[int, float]) -> list[dict[str, Any]]:
    """The plan's prediction beside each rank: its compute, then what is left of the step."""
    plans = [event for event in run.events("plan") if (event["step"] or 0) <= step]
    plan = plans[-1].get("plan") if plans else None
    if not isinstance(plan, dict):
        return []
    try:
        step_s = float(plan["predicted"]["step_s"])
        roles = [(plan["roles"][name], int(count)) for name, count in plan["ranks"]]
        times = [(float(role["compute_s"]), float(role.get("after_s", 0.0)), count) for role, count in roles]
    except (KeyError, TypeError, ValueError, AttributeError):
        return []  # not the plan of this version
    events: list[dict[str, Any]] = []
    by_rank = [(compute, after) for compute, after, count in times for _ in range(min(count, PREDICTED))]
    for rank, (compute, after) in enumerate(by_rank):
        if rank not in begins:
            continue
        pid, begin = PREDICTED + rank, begins[rank]
        ready, averaged = compute - after, max(step_s - after, compute - after)
        events.append(label("process_name", pid, 0, f"rank {rank}, predicted"))
        events.append({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": rank}})
        events.append(interval("forward and backward", "compute", pid, 0, begin, begin + ready))
        events.append(
            interval("exposed exchange and waiting", "wait", pid, 0, begin + ready, begin + averaged)
        )
        events.append(interval("optimizer", "optimizer", pid, 0, begin + averaged, begin + averaged + after))
    return events
