"""Reads a run folder: for everything that shows a run (docs/run-folder.md).

This never fails on what is inside: lines that are broken, half-written or of another form are counted and left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.report.run_info import RUNS, VERSION

MOST_LINE = 4 << 20
"""Characters of the longest line that is read."""

RANK_FILE = re.compile(r"rank-(\d{1,6})\.jsonl")
_TIMES = ("data", "compute", "codec", "wire", "optimizer")


@dataclass(kw_only=True)
class Rank:
    """What one rank wrote."""

    rank: int
    events: list[dict[str, Any]]
    """In the order written; `time` is on rank 0's clock."""

    broken_lines: int = 0
    offset_s: float = 0.0
    """What was subtracted from this rank's times to align them with those of rank 0."""

    live: dict[str, Any] = field(default_factory=dict)
    """Its last finished step; the form of a step sample."""

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] in kinds]

    @property
    def start(self) -> dict[str, Any]:
        """The event of its (last) start; empty if there is none."""
        return (self.of("start") or [{}])[-1]

    @property
    def end(self) -> dict[str, Any]:
        """The event of its end; empty while it runs, and after it was killed."""
        return self.events[-1] if self.events and self.events[-1]["kind"] == "end" else {}


@dataclass(kw_only=True)
class Run:
    """A run as its folder tells it."""

    folder: Path
    info: dict[str, Any]
    """run.json; empty where that is missing or broken."""

    ranks: dict[int, Rank]
    problems: list[str]
    """What was left out, in words."""

    @property
    def world_size(self) -> int:
        sizes = [rank.start.get("world_size") for rank in self.ranks.values()]
        return max([size for size in sizes if isinstance(size, int)], default=len(self.ranks))

    @property
    def ended(self) -> bool:
        """Whether every rank wrote its end; False for running, killed and empty runs."""
        return bool(self.ranks) and all(rank.end for rank in self.ranks.values())

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Events of all ranks in the order of time, each with its `rank`."""
        found = [{**event, "rank": rank.rank} for rank in self.ranks.values() for event in rank.of(*kinds)]
        return sorted(found, key=lambda event: float(event["time"]))

    @cached_property
    def steps(self) -> dict[int, list[dict[str, Any]]]:
        """Step samples by rank, each with `waiting` (seconds) and `waits_for` (a rank, or None).

        A rank waits from its own last gradient to that of the last rank; `wire` is what is left of the exchange.
        Ranks of a sharded model meet in every layer: there the one with the shortest exchange is last.
        """
        of_step: dict[int, dict[int, dict[str, Any]]] = {}
        for rank in self.ranks.values():
            for sample in rank.of("step"):
                of_step.setdefault(sample["step"], {})[rank.rank] = sample
        return {
            rank.rank: [_with_waiting(s, rank.rank, of_step[s["step"]]) for s in rank.of("step")]
            for rank in self.ranks.values()
        }

    def brought(self, decision: Mapping[str, Any], *, within: int = 5) -> tuple[float, float] | None:
        """Median step times of the samples before and after a decision; None where there are too few."""
        samples = self.steps.get(int(decision.get("rank", 0)), [])
        at = decision["step"]
        before = [s["seconds"] for s in samples if s["step"] <= at][-within:]
        after = [s["seconds"] for s in samples if s["step"] - s["steps"] >= at][:within]
        return (median(before), median(after)) if len(before) >= 2 and len(after) >= 2 else None


def load_run(path: str | Path) -> Run:
    """Read a run folder.

    Raises:
        TrimtabError: there is no such folder, or it has neither run.json nor events.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise TrimtabError(f"{folder}: there is no such run folder; `trimtab run` makes one in {RUNS}/")
    problems: list[str] = []
    info = read_info(folder, problems)
    ranks = {}
    for file in sorted(folder.iterdir()):
        match = RANK_FILE.fullmatch(file.name)
        if match and file.is_file():
            rank = _read_rank(file, int(match[1]))
            rank.live = read_live(folder, rank.rank)
            ranks[rank.rank] = rank
            if rank.broken_lines:
                problems.append(f"{file.name}: {rank.broken_lines} lines are not events and were left out")
    if not info and not ranks:
        raise TrimtabError(f"{folder}: this is no run folder: it has neither run.json nor rank-N.jsonl")
    _align(ranks)
    return Run(folder=folder, info=info, ranks=dict(sorted(ranks.items())), problems=problems)


def read_info(folder: Path, problems: list[str]) -> dict[str, Any]:
    """run.json; empty where that is missing or broken, and then `problems` says so."""
    return _read_object(folder / "run.json", problems)


def read_live(folder: Path, rank: int) -> dict[str, Any]:
    """The last step of a rank; empty where none is written."""
    return _step(_read_object(folder / f"live-{rank}.json", [])) or {}


def latest_run(base: str | Path = ".") -> Path:
    """The newest run folder below `base`/trimtab-runs."""
    parent = Path(base) / RUNS
    folders = [path for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
    if not folders:
        raise TrimtabError(f"there is no run in {parent}; give the path of a run folder")
    return max(folders, key=lambda path: path.stat().st_mtime)


def _with_waiting(sample: dict[str, Any], own: int, of_step: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """A sample with its part of waiting, by the samples of the same step on all ranks."""
    last, waiting, wire = own, 0.0, sample["wire"]
    ready = {rank: other["ready"] for rank, other in of_step.items() if other["ready"] is not None}
    if own in ready:
        last, exchanged = max(ready, key=lambda rank: (ready[rank], -rank)), sample["exchanged"]
        if last != own and wire is not None and exchanged is not None:
            # The times are those of one step, the seconds means over several.
            part = (ready[last] - ready[own]) / max(exchanged - ready[own], 1e-9)
            waiting = min(max(part, 0.0) * (wire + (sample["codec"] or 0.0)), wire)
    elif wire is not None:
        wires = {rank: other["wire"] for rank, other in of_step.items() if other["wire"] is not None}
        last = min(wires, key=lambda rank: (wires[rank], rank))
        waiting = wire - max(wires[last], 0.0)
    if waiting <= 0:
        return {**sample, "waiting": 0.0, "waits_for": None}
    return {**sample, "waiting": waiting, "wire": wire - waiting, "waits_for": last}


def _align(ranks: Mapping[int, Rank]) -> None:
    """Subtract from each rank's times the median by which its exchanges end later than those of the first rank.

    An exchange of gradients ends on all ranks at the same moment, up to a message's time. Ranks of one machine have
    the same clock and are left as they are.
    """
    if not ranks:
        return
    first = ranks[min(ranks)]
    ends = _exchange_ends(first)
    for rank in ranks.values():
        if _machine(rank) is not None and _machine(rank) == _machine(first):
            continue
        late = [end - ends[step] for step, end in _exchange_ends(rank).items() if step in ends]
        rank.offset_s = median(late) if late else 0.0
        for event in rank.events:
            for name in ("time", "ready", "exchanged", "began"):
                if isinstance(event.get(name), int | float):
                    event[name] -= rank.offset_s


def _machine(rank: Rank) -> Any:
    """Whose clock a rank reads; several emulated hosts are one machine."""
    return rank.start.get("machine") or rank.start.get("host")


def _exchange_ends(rank: Rank) -> dict[int, float]:
    return {s["step"]: s["exchanged"] for s in rank.of("step") if s.get("exchanged") is not None}


def _read_rank(file: Path, number: int) -> Rank:
    rank = Rank(rank=number, events=[])
    with file.open(encoding="utf-8", errors="replace") as lines:
        while line := lines.readline(MOST_LINE):
            if not line.strip():
                continue
            event = parse_event(line)
            if event is None:
                rank.broken_lines += 1
            else:
                rank.events.append(event)
    return rank


def parse_event(line: str) -> dict[str, Any] | None:
    """The event of a line; None if it is none."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if (
        not isinstance(event, dict)
        or not isinstance(event.get("kind"), str)
        or not is_number(event.get("time"))
    ):
        return None
    if event.get("step") is not None and not _count(event["step"]):
        return None
    return _step(event) if event["kind"] == "step" else event


def _step(event: dict[str, Any]) -> dict[str, Any] | None:
    """A step sample whose numbers are numbers; None if it lacks what every sample has."""
    if not (_count(event.get("step")) and _count(event.get("steps")) and is_number(event.get("seconds"))):
        return None
    numbers = (
        *_TIMES,
        "exchange",
        "ready",
        "exchanged",
        "began",
        "memory",
        "sent",
        "sent_plain",
        "bits",
        "samples",
    )
    checked = {name: event.get(name) if is_number(event.get(name)) else None for name in numbers}
    loss = event.get("loss")
    if not is_number(loss) and loss not in ("nan", "inf", "-inf"):
        loss = None
    return {**event, **checked, "loss": loss}


def _read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            value = json.loads(file.read(MOST_LINE))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(value, dict) or value.get("version", VERSION) != VERSION:
        problems.append(f"{path.name}: version {VERSION} of the run folder is expected")
        return value if isinstance(value, dict) else {}
    return value


def is_number(value: object) -> bool:
    """Whether it is a finite number of reasonable size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
