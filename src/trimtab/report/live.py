"""A run as it is now: followed by reading what its ranks append, and drawn as a table."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from trimtab.report.run_folder import RANK_FILE, Rank, Run, is_number, parse_event, read_info, read_live
from trimtab.report.summary import duration, size, throughput

MOST_ROWS, MOST_DECISIONS = 8, 3
"""Ranks and decisions that are shown."""

_KEPT = 100
"""Step samples of a rank, and its other events, that are kept."""

_LASTING = ("start", "device", "progress")
"""Kinds of events of which the last is always kept."""

_MOST_READ = 1 << 20
"""Bytes that are read from a file at a time: the rest the next time."""


class LiveRun:
    """Follows a run folder; each `poll` reads only what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ranks: dict[int, Rank] = {}
        self._read: dict[int, int] = {}
        self._info: dict[str, Any] = {}

    def poll(self) -> Run:
        """The run as far as it is written."""
        if not self._info:
            self._info = read_info(self.folder, [])
        for file in sorted(self.folder.glob("rank-*.jsonl")) if self.folder.is_dir() else []:
            match = RANK_FILE.fullmatch(file.name)
            if match:
                self._read_more(
                    file, self._ranks.setdefault(int(match[1]), Rank(rank=int(match[1]), events=[]))
                )
        ranks = dict(sorted(self._ranks.items()))
        return Run(folder=self.folder, info=self._info, ranks=ranks, problems=[])

    def _read_more(self, file: Path, rank: Rank) -> None:
        with file.open("rb") as lines:
            lines.seek(self._read.get(rank.rank, 0))
            data = lines.read(_MOST_READ)
        complete = data.rfind(b"\n") + 1
        if not complete and len(data) == _MOST_READ:
            complete = len(data)  # a line that long is no event
        self._read[rank.rank] = self._read.get(rank.rank, 0) + complete
        for line in data[:complete].decode(errors="replace").splitlines():
            event = parse_event(line)
            if event is not None and event["kind"] not in ("trace", "layers", "bits"):
                rank.events.append(event)
        lasting = [event for kind in _LASTING for event in rank.of(kind)[-1:]]
        others = [event for event in rank.events if event["kind"] != "step"]
        kept = {id(event) for event in (*lasting, *rank.of("step")[-_KEPT:], *others[-_KEPT:])}
        rank.events = [event for event in rank.events if id(event) in kept]
        rank.live = read_live(self.folder, rank.rank)


def frame(run: Run, *, width: int = 100, now: float | None = None) -> Group:
    """The state of a run as a table of its ranks, with the last decisions below."""
    now = time.time() if now is None else now
    table = Table(expand=True, box=None, pad_edge=False, header_style="bold")
    for name in (
        "rank",
        "step",
        "ms/step",
        "samples",
        "share",
        "bits",
        "waiting",
        "for",
        "wire",
        "data",
        "memory",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    total = sum(_last(rank).get("samples") or 0 for rank in run.ranks.values())
    for number, rank in list(run.ranks.items())[:MOST_ROWS]:
        table.add_row(*_row(run, number, rank, total))
    parts: list[Any] = [Text(_headline(run, now), style="bold"), table]
    if len(run.ranks) > MOST_ROWS:
        parts.append(Text(f"... and {len(run.ranks) - MOST_ROWS} more ranks"))
    for event in [*run.events("decision", "warning", "guard")][-MOST_DECISIONS:]:
        text = event.get("decided") or event.get("reason") or event.get("message") or ""
        parts.append(
            Text(
                f"step {event['step']}: {text}"[:width],
                style="dim" if event["kind"] == "decision" else "yellow",
            )
        )
    return Group(*parts)


def frame_lines(run: Run, width: int, *, color: bool) -> list[str]:
    """The frame as lines of a terminal of this width."""
    console = Console(
        file=io.StringIO(), width=width, force_terminal=color, color_system="standard" if color else None
    )
    with console.capture() as capture:
        console.print(frame(run, width=width))
    return capture.get().rstrip("\n").split("\n")


def status_line(run: Run) -> str:
    """The state of a run in one line, for logs."""
    return _headline(run, time.time())


def _last(rank: Rank) -> dict[str, Any]:
    samples = rank.of("step")
    newest = samples[-1] if samples else {}
    return rank.live if rank.live.get("step", 0) >= newest.get("step", 0) else newest


def _row(run: Run, number: int, rank: Rank, total: float) -> list[str]:
    last, samples = _last(rank), run.steps.get(number, [])
    if not last:
        return [str(number), "-", *[""] * 9]
    recent = samples[-10:] or [{**last, "waiting": 0.0, "waits_for": None}]
    steps = sum(sample["steps"] for sample in recent)

    def mean(name: str) -> float:
        return float(sum((sample[name] or 0.0) * sample["steps"] for sample in recent) / steps)

    seconds = mean("seconds") or 1e-9
    waits = [sample["waits_for"] for sample in recent if sample["waits_for"] is not None]
    own = last.get("samples")
    limit = next((e.get("memory_limit") for e in reversed(rank.of("device"))), None)
    memory = "" if last.get("memory") is None else size(last["memory"])
    if memory and isinstance(limit, int) and limit > 0:
        memory = f"{memory} ({last['memory'] / limit:.0%})"
    return [
        str(number),
        f"{last['step']:,}",
        f"{seconds * 1e3:.4g}",
        "" if own is None else f"{own}",
        "" if own is None or not total else f"{own / total:.0%}",
        "32" if last.get("bits") is None else f"{last['bits']:.1f}",
        f"{mean('waiting') / seconds:.0%}",
        f"{max(set(waits), key=waits.count)}" if waits else "",
        f"{mean('wire') / seconds:.0%}",
        f"{mean('data') / seconds:.0%}",
        memory,
    ]


def _headline(run: Run, now: float) -> str:
    script = Path(str(run.info.get("script") or run.folder.name)).name
    step = max((_last(rank).get("step", 0) for rank in run.ranks.values()), default=0)
    parts = [f"{script}: {_state(run, now)}", f"step {step:,}"]
    samples = throughput(run)
    steps = run.steps.get(min(run.ranks, default=0), [])
    if steps:
        parts.append(f"{1 / max(steps[-1]['seconds'], 1e-9):.3g} steps/s")
    if samples is not None:
        parts.append(f"{samples:.4g} samples/s")
    loss = steps[-1]["loss"] if steps else None
    if loss is not None:
        parts.append(f"loss {float(loss):.4g}")
    if steps and (left := _left(run, step)):
        recent = steps[-10:]
        pace = sum(s["seconds"] * s["steps"] for s in recent) / sum(s["steps"] for s in recent)
        parts.append(f"{duration(left[0] * pace)} left of {left[1]}")
    return ", ".join(parts)


def _left(run: Run, step: int) -> tuple[int, str] | None:
    """Steps that are left of the job, or else of the epoch, and which; None where nothing knows it."""
    known = run.events("progress")[-1:]
    for name, of in (("total_steps", "{:,} steps"), ("epoch_ends", "the epoch")):
        end: Any = known[0].get(name) if known else None
        if is_number(end) and end > step:
            return int(end) - step, of.format(int(end))
    return None


def _state(run: Run, now: float) -> str:
    if run.ended:
        failed = [number for number, rank in run.ranks.items() if rank.end.get("status")]
        return f"failed on rank {failed[0]}" if failed else "ended"
    times = [float(_last(rank).get("time", 0)) for rank in run.ranks.values()]
    if not times or not max(times):
        started: Any = run.info.get("started")
        waited = now - started if is_number(started) else 0.0
        return "starting" if waited < 60 else f"no step in {duration(waited)}"
    silent = now - max(times)
    return "running" if silent < 30 else f"no step for {duration(silent)}"
