"""The outcome of a run, and which rank failed first."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.emulate.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a run failed."""

    rank: int | None
    """The rank that failed first; None if the launch failed."""

    host: str | None
    status: int
    """Exit status of that rank; negative for a signal, as in `subprocess`."""

    text: str
    """Its traceback, or a line that says how it ended."""

    def __str__(self) -> str:
        where = "the launch" if self.rank is None else f"rank {self.rank} (host {self.host})"
        return f"{where} failed:\n{self.text.rstrip()}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a run."""

    status: int
    """0, or the exit status of the failed rank (128 + number for a signal), as in a shell."""

    failure: Failure | None = None
    stdout: str = ""
    """Standard output of rank 0, if it was captured."""

    steps: tuple[int, ...] = ()
    """Number of optimizer steps of each rank."""


def node_folder(run: Path, node: int) -> Path:
    """Folder of a node's ranks, in which those that fail report it, as under `trimtab run`."""
    return run / f"node-{node}"


def _reports(run: Path) -> list[Path]:
    """A file for each rank that reported a failure: time, text and, unless `trimtab run` ran it, exit status."""
    return list(run.glob("node-*/[0-9]*.json"))


def any_report(run: Path) -> bool:
    """Whether a rank has reported a failure."""
    return bool(_reports(run))


def exit_codes_path(run: Path, node: int) -> Path:
    """File in which an agent reports the exit codes of its failed ranks."""
    return run / f"exit-codes-{node}.json"


def first_failure(run: Path, placements: Sequence[Placement]) -> Failure | None:
    """The failure that caused the others.

    A rank killed by a signal cannot report it, but the ranks waiting for it report errors: so signals come first,
    then the earliest report.
    """
    codes: dict[int, int] = {}
    for path in run.glob("exit-codes-*.json"):
        codes.update({int(rank): code for rank, code in json.loads(path.read_text()).items()})
    for rank, code in sorted(codes.items()):
        if code < 0 and -code not in (signal.SIGTERM, signal.SIGPIPE):
            return _failure(
                placements[rank], code, f"killed by signal {-code} ({signal.Signals(-code).name})"
            )
    reports = []
    for path in _reports(run):
        report, rank = json.loads(path.read_text()), int(path.stem)
        reports.append((report["time"], rank, report.get("status", codes.get(rank, 1)), report["text"]))
    if reports:
        _, rank, status, text = min(reports)
        return _failure(placements[rank], status, text)
    for rank, code in sorted(codes.items()):
        return _failure(placements[rank], code, f"exited with status {code}")
    return None


def _failure(placement: Placement, status: int, text: str) -> Failure:
    return Failure(rank=placement.rank, host=placement.host, status=status, text=text)
