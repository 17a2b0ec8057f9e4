"""How a run ended, and which rank it was that failed first."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trimtab.emulate.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a run failed."""

    rank: int | None
    """The rank that failed first; None when the launch itself did."""

    host: str | None
    status: int
    """Exit status of that rank; negative for a signal, as `subprocess` has it."""

    text: str
    """Its own traceback, or one line that says how it ended."""

    def __str__(self) -> str:
        where = "the launch" if self.rank is None else f"rank {self.rank} (host {self.host})"
        return f"{where} failed:\n{self.text.rstrip()}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    status: int
    """0, or the failed rank's exit status (128 + number for a signal), as a shell has it."""

    failure: Failure | None = None
    stdout: str = ""
    """What rank 0 wrote to its standard output, where it was captured."""

    steps: tuple[int, ...] = ()
    """Optimizer steps each rank had done."""


def error_path(run: Path, rank: int) -> Path:
    """Where a rank leaves its own account of its failure: time, exit status, text."""
    return run / f"error-{rank}.json"


def any_account(run: Path) -> bool:
    """Whether a rank has already said that it failed."""
    return any(run.glob("error-*.json"))


def report_path(run: Path, node: int) -> Path:
    """Where an agent leaves the exit status of each of its ranks that failed."""
    return run / f"report-{node}.json"


def first_failure(run: Path, placements: Sequence[Placement]) -> Failure | None:
    """The failure that brought the others about.

    A rank that dies of a signal cannot say so itself, and those left waiting for it do: so
    signals come first, and then the earliest account.
    """
    codes: dict[int, int] = {}
    for path in run.glob("report-*.json"):
        codes.update({int(rank): code for rank, code in json.loads(path.read_text()).items()})
    for rank, code in sorted(codes.items()):
        if code < 0 and -code not in (signal.SIGTERM, signal.SIGPIPE):
            return _failure(placements[rank], code, f"ended by signal {-code} ({signal.Signals(-code).name})")
    accounts = []
    for placement in placements:
        if error_path(run, placement.rank).exists():
            account = json.loads(error_path(run, placement.rank).read_text())
            accounts.append((account["time"], placement, account["status"], account["text"]))
    if accounts:
        _, placement, status, text = min(accounts, key=lambda account: account[0])
        return _failure(placement, status, text)
    for rank, code in sorted(codes.items()):
        return _failure(placements[rank], code, f"exited with status {code}")
    return None


def _failure(placement: Placement, status: int, text: str) -> Failure:
    return Failure(rank=placement.rank, host=placement.host, status=status, text=text)
