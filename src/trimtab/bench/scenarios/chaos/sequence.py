"""One sequence: a job of real ranks, the faults that strike it, and a verdict on what came out."""

from __future__ import annotations

import collections.abc
import json
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from trimtab.bench.scenarios.chaos.faults import Fault, Strike
from trimtab.bench.scenarios.chaos.processes import HOSTS, ForkedRanks, LaunchedRanks, Ranks
from trimtab.bench.scenarios.chaos.rank import saved
from trimtab.bench.scenarios.chaos.training import JOBS, STEPS
from trimtab.emulate import Emulation
from trimtab.emulate.links import INTERFACE

GRACE_S = 12.0
"""Seconds beyond the user's timeout for ranks to end: threads that wait for a dead rank are given 5 s at exit, and
this machine may be busy."""

LIMIT_S = 120.0
"""Seconds for one start of the job."""

TOLERANCE = {"data": 0.1, "planned": 0.1, "tensor": 1e-2, "grid": 0.1}
"""Largest distance of the parameters from those of the run without faults, relative to how far that run went."""

_TORCHS_OWN = re.compile(r"temporary file tmp\w{8}")
"""What torch's DataLoader may leave when a worker dies: it then opens temporary files to see whether it still can, and
its own handler of the worker's death interrupts it there."""

_POLL_S = 0.005


@dataclass(kw_only=True)
class Verdict:
    """What came out of one sequence."""

    job: str
    strikes: list[Strike]
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    adjustments: dict[str, int] = field(default_factory=dict)
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)


def draw(faults: collections.abc.Sequence[Fault], job: str, random: random.Random) -> list[Strike]:
    """Where and when each fault strikes: one after another, as far apart as the job is long."""
    gap = (STEPS - 8) // len(faults)
    return [
        Strike(
            fault=fault,
            # The layer log is rank 0's.
            rank=0 if fault.name == "log_full" else random.randrange(JOBS[job].ranks),
            step=0 if fault.at_start else index * gap + random.randrange(gap),
            delay_s=random.random() * 0.03,
        )
        for index, fault in enumerate(sorted(faults, key=lambda fault: not fault.at_start))
    ]


class Sequence:
    """Starts the ranks, lets the faults strike, restarts what ended, and judges the end."""

    def __init__(
        self,
        job: str,
        strikes: list[Strike],
        *,
        seed: int,
        emulation: Emulation | None = None,
        oracle: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.job, self.seed, self.oracle = job, seed, oracle
        self.ranks = JOBS[job].ranks
        self.emulation = emulation
        self.verdict = Verdict(job=job, strikes=strikes)
        self.pending = list(strikes)
        self.timeout_s = max((strike.fault.timeout_s for strike in strikes), default=5.0)
        self.folder = Path()

    def run(self) -> Verdict:
        self.folder = Path(tempfile.mkdtemp(prefix="trimtab-chaos-"))
        try:
            while not self._attempt():
                pass
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        return self.verdict

    def _attempt(self) -> bool:
        """Start the job once; returns whether the sequence is over."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        for pattern in ("events-*", "result-*", "rank-*.log", "log"):
            for path in self.folder.glob(pattern):
                path.unlink()
        # Links are not those of the launcher's ranks: one fault at a time there.
        by_launcher = bool(self.pending) and self.pending[0].fault.by == "launcher"
        attempt = (LaunchedRanks if by_launcher else ForkedRanks)(self.spec(by_launcher), self.emulation)
        unrecovered = [strike for strike in self.verdict.strikes if strike.at and strike.recovered_s is None]
        struck: list[Strike] = []
        try:
            attempt.start(port_in_use=by_launcher and self.pending[0].fault.name == "port_in_use")
            self._watch(attempt, struck)
        finally:
            attempt.kill()
        after = ", ".join(strike.fault.name for strike in struck) or "no fault"
        worker_killed = any(s.fault.name == "kill_worker" and s.at for s in self.verdict.strikes)
        self.verdict.leaked += [
            f"after {after}: {leak}"
            for leak in attempt.leaks()
            if not (worker_killed and _TORCHS_OWN.fullmatch(leak))
        ]
        for strike in unrecovered:
            if strike.at is not None and (first := attempt.steps_after(0.0, 1)) is not None:
                strike.recovered_s = first - strike.at
        for strike in struck:
            self.pending.remove(strike)
            if strike.fault.name == "bad_checkpoint":
                damage_checkpoint(self.folder / "checkpoints", strike.step)
        complaints = attempt.complaints(struck)
        self.verdict.wrong += [f"after {after}: {complaint}" for complaint in complaints]
        if self.verdict.hangs or self.verdict.wrong:
            return True
        if any(attempt.statuses()):
            return False
        self._judge()
        return True

    def spec(self, by_launcher: bool) -> dict[str, Any]:
        """What every rank is told."""
        network = None if by_launcher or self.emulation is None else self.emulation.network
        return {
            "job": self.job,
            "seed": self.seed,
            "folder": str(self.folder),
            "timeout_s": self.timeout_s,
            # Long enough to tell ranks that end from ranks that finish.
            "pause_s": 0.25 if by_launcher else 0.0,
            "slow_from": self.seed % 10,
            "workers": int(any(strike.fault.name == "kill_worker" for strike in self.verdict.strikes)),
            "namespaces": [network.namespace(host) for host in HOSTS[: self.ranks]] if network else [],
            "address": network.address(HOSTS[0]) if network else "127.0.0.1",
            "interface": INTERFACE if network else "lo",
            "inner": [
                {
                    "name": strike.fault.name,
                    "rank": strike.rank,
                    "step": strike.step,
                    "at_start": strike.fault.at_start,
                }
                for strike in self.pending
                if strike.fault.by == "rank"
            ],
        }

    def _watch(self, attempt: Ranks, struck: list[Strike]) -> None:
        """Let faults strike until every rank has ended, or is late; adds to `struck`."""
        deadline, ending = time.monotonic() + LIMIT_S, False
        while running := attempt.running():
            for strike in self.pending:
                if strike not in struck and self._strike(strike, attempt):
                    struck.append(strike)
            attempt.undo(running)
            # Before the ranks run, the time is that of starting Python.
            if not ending and (
                attempt.failed() or any(s.fault.ends and not s.fault.at_start for s in struck)
            ):
                ending, deadline = True, time.monotonic() + self.timeout_s + GRACE_S
            for strike in struck:
                if strike.recovered_s is None and not strike.fault.ends and strike.at is not None:
                    reached = attempt.steps_after(strike.at, 2)
                    strike.recovered_s = None if reached is None else reached - strike.at
            if time.monotonic() > max(deadline, attempt.undone_at + self.timeout_s + GRACE_S):
                names = ", ".join(strike.fault.name for strike in struck)
                self.verdict.hangs.append(f"after {names}: ranks {running} do not end:\n{attempt.stacks()}")
                return
            time.sleep(_POLL_S)
        for strike in struck:
            if strike.fault.ends and strike.at is not None:
                strike.ended_s = time.monotonic() - strike.at

    def _strike(self, strike: Strike, attempt: Ranks) -> bool:
        """Bring a fault about if it is due; returns whether it struck."""
        if strike.fault.by == "rank":
            strike.at = attempt.time_of(strike.rank, f"fault {strike.fault.name}")
        elif strike.fault.name == "port_in_use":
            strike.at = attempt.started_at if isinstance(attempt, LaunchedRanks) else None
        elif attempt.reached(strike.rank, strike.step):
            time.sleep(strike.delay_s)
            now = time.monotonic()
            strike.at = now if attempt.strike(strike) else None
        return strike.at is not None

    def _judge(self) -> None:
        """The job says that it has succeeded: is that so?"""
        results = [
            json.loads((self.folder / f"result-{rank}.json").read_text()) for rank in range(self.ranks)
        ]
        for rank, result in enumerate(results):
            for what, value in result["digests"].items():
                if any(value != other["digests"].get(what, value) for other in results):
                    self.verdict.wrong.append(f"rank {rank}: its {what} differ from another rank's")
        self.verdict.adjustments = results[0]["adjustments"]
        try:
            values = JOBS[self.job].parameters_in(self.folder / "checkpoints" / str(STEPS))
        except (Exception, CheckpointException) as error:
            self.verdict.wrong.append(f"the last checkpoint cannot be read: {type(error).__name__}: {error}")
            return
        self.verdict.parameters = values
        if self.oracle is not None and (far := self._distance(values, self.oracle)) > TOLERANCE[self.job]:
            self.verdict.wrong.append(f"the parameters are {far:.3g} off those of a run without faults")

    def _distance(self, values: Mapping[str, torch.Tensor], oracle: Mapping[str, torch.Tensor]) -> float:
        """How far apart two runs ended, relative to how far the second one went from its start."""
        start = JOBS[self.job].parameters_at_start(self.seed)
        apart = sum(float((values[name] - oracle[name]).double().square().sum()) for name in oracle)
        way = sum(float((start[name] - oracle[name]).double().square().sum()) for name in oracle)
        return float("inf") if apart != apart else (apart / way) ** 0.5


def damage_checkpoint(home: Path, how: int) -> None:
    """Truncate, empty or remove a file of the newest of two checkpoints."""
    steps = saved(home)
    if len(steps) < 2:
        return
    file = max((path for path in (home / str(steps[-1])).rglob("*") if path.is_file()), key=lambda p: p.name)
    if how % 3 == 2:
        file.unlink()
    else:
        os.truncate(file, how % 3 * file.stat().st_size // 2)
