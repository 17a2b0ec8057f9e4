"""`trimtab bench chaos`: random sequences of faults on real ranks, while trimtab changes bits, shares, plans and units.

A sequence is one job with one to three faults. Ranks that end are started again and resume from their checkpoint.
At the end the job must have come to the result of a run without faults. Counted are

- `hangs`: ranks that did not end within the job's own timeout and some seconds;
- `wrong`: a job that succeeded with replicas that differ, parameters far from those of a run without faults, or a
  checkpoint that cannot be read; that was ended by a fault it should survive; that aborted, or ended without a word;
- `leaked`: processes, temporary files, shared segments, namespaces or control groups that were left behind.

The canary, a rank whose reduced gradient is wrong, must come out as wrong.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from trimtab.bench.harness import Result
from trimtab.bench.ranks import hosts
from trimtab.bench.scenarios.chaos.faults import CANARY, FAULTS, Fault
from trimtab.bench.scenarios.chaos.sequence import Sequence, Verdict, draw
from trimtab.bench.scenarios.chaos.training import JOBS
from trimtab.emulate import Emulation
from trimtab.environment import logger
from trimtab.errors import TrimtabError

TIMES = 5
"""How often every fault strikes at least."""

FULL = 200
BUDGET_S = 900.0
_MODEL_SEED = 1


def chaos(
    seed: int, full: bool, sequences: int, only: list[str], progress: Callable[[int, int], None]
) -> Result:
    """Run sequences: as many as asked for, with `full` at least 200, otherwise as many as fit 15 minutes."""
    if unknown := [name for name in only if name not in FAULTS]:
        raise TrimtabError(f"bench chaos: there is no fault {unknown[0]!r}; choose from {', '.join(FAULTS)}")
    faults = [FAULTS[name] for name in only] or list(FAULTS.values())
    generator = random.Random(seed)
    verdicts: list[Verdict] = []
    with ExitStack() as stack:
        emulation = _emulation(stack)
        if emulation is None:
            faults = [fault for fault in faults if not fault.links]
        oracles = {job: _run(job, [], emulation, None, 0) for job in _jobs_of(faults)}
        for verdict in oracles.values():
            _tell(0, verdict)
        known = {job: verdict.parameters for job, verdict in oracles.items()}
        canary = _run("data", [CANARY], emulation, known.get("data"), seed)
        end, deck = time.monotonic() + BUDGET_S, _Deck(faults, generator)
        while not _is_over(verdicts, faults, sequences, full, end):
            job, chosen = deck.deal()
            verdict = _run(job, chosen, emulation, known[job], generator.randrange(1 << 30))
            verdicts.append(verdict)
            _tell(len(verdicts), verdict)
            progress(len(verdicts), sequences or (FULL if full else _expected(verdicts, end)))
        network = [] if emulation is None else _namespaces(emulation)
    left = [name for name in network if Path("/run/netns", name).exists()]
    return _result(seed, verdicts, list(oracles.values()), canary, faults, left)


def _emulation(stack: ExitStack) -> Emulation | None:
    """Four hosts with links that can be cut; None where that needs more than this user may do."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "nsenter"))):
        logger().warning("chaos: links cannot be cut here (that needs root, ip, tc and nsenter): left out")
        return None
    return stack.enter_context(Emulation(hosts((1.0,) * 4, link="1gbit")))


def _namespaces(emulation: Emulation) -> list[str]:
    assert emulation.network is not None
    return [emulation.network.namespace(name) for name, _ in emulation.cluster.machines()]


def _jobs_of(faults: list[Fault]) -> list[str]:
    return [job for job in JOBS if job == "data" or any(job in fault.jobs for fault in faults)]


class _Deck:
    """Deals faults evenly: everyone strikes once before any strikes again."""

    def __init__(self, faults: list[Fault], generator: random.Random) -> None:
        self._faults, self._random = faults, generator
        self._left: list[Fault] = []

    def deal(self) -> tuple[str, list[Fault]]:
        """A job, and one to three faults for it."""
        if not self._left:
            self._left = self._random.sample(self._faults, len(self._faults))
        first = self._left.pop()
        job = self._random.choice(first.jobs)
        chosen = [first]
        if first.by != "launcher":  # its ranks start slowly: alone
            others = [fault for fault in self._left if job in fault.jobs and fault.by != "launcher"]
            for fault in others[: self._random.randrange(3)]:
                # Only one of the faults at the start can be told apart from the others.
                if not fault.at_start or not any(each.at_start for each in chosen):
                    chosen.append(fault)
                    self._left.remove(fault)
        return job, chosen


def _run(
    job: str,
    faults: list[Fault],
    emulation: Emulation | None,
    oracle: Mapping[str, torch.Tensor] | None,
    seed: int,
) -> Verdict:
    strikes = draw(faults, job, random.Random(seed)) if faults else []
    return Sequence(job, strikes, seed=_MODEL_SEED, emulation=emulation, oracle=oracle).run()


def _is_over(verdicts: list[Verdict], faults: list[Fault], sequences: int, full: bool, end: float) -> bool:
    if sequences:
        return len(verdicts) >= sequences
    struck = _struck(verdicts)
    if any(struck[fault.name] < TIMES for fault in faults):
        return False
    return len(verdicts) >= FULL if full else time.monotonic() > end


def _expected(verdicts: list[Verdict], end: float) -> int:
    """How many sequences there will be, at the pace so far."""
    spent = BUDGET_S - (end - time.monotonic())
    return max(len(verdicts) + 1, round(len(verdicts) * BUDGET_S / max(spent, 1.0)))


def _struck(verdicts: Iterable[Verdict]) -> Counter[str]:
    return Counter(s.fault.name for verdict in verdicts for s in verdict.strikes if s.at is not None)


def _tell(number: int, verdict: Verdict) -> None:
    names = ", ".join(strike.fault.name for strike in verdict.strikes)
    for kind in ("hangs", "wrong", "leaked"):
        for text in getattr(verdict, kind):
            logger().warning("chaos: sequence %d (%s, %s) %s: %s", number, verdict.job, names, kind, text)


def _result(
    seed: int,
    verdicts: list[Verdict],
    oracles: list[Verdict],
    canary: Verdict,
    faults: list[Fault],
    left: list[str],
) -> Result:
    strikes = [strike for verdict in verdicts for strike in verdict.strikes if strike.at is not None]
    recovered = [strike.recovered_s for strike in strikes if strike.recovered_s is not None]
    adjustments: Counter[str] = Counter()
    for verdict in verdicts:
        adjustments.update(verdict.adjustments)
    every = [*oracles, *verdicts]
    summary: dict[str, Any] = {
        "seed": seed,
        "sequences": len(verdicts),
        "hangs": sum(bool(verdict.hangs) for verdict in every),
        "wrong": sum(bool(verdict.wrong) for verdict in every),
        "leaked": sum(bool(verdict.leaked) for verdict in every) + len(left),
        "mean_recovery_s": fmean(recovered) if recovered else 0.0,
        "by_fault": dict(_struck(verdicts)),
        "canary_flagged": bool(canary.wrong),
        "adjustments": dict(adjustments),
    }
    return Result(bench="chaos", summary=summary, rows=[_row(fault, verdicts) for fault in faults])


def _row(fault: Fault, verdicts: list[Verdict]) -> dict[str, Any]:
    struck = [
        (verdict, strike)
        for verdict in verdicts
        for strike in verdict.strikes
        if strike.fault is fault and strike.at is not None
    ]
    recovered = [strike.recovered_s for _, strike in struck if strike.recovered_s is not None]
    ended = [strike.ended_s for _, strike in struck if strike.ended_s is not None]
    return {
        "method": fault.name,
        "what": fault.does,
        "times": len(struck),
        "outcome": "ends, resumes" if fault.ends else "goes on",
        "mean_recovery_s": fmean(recovered) if recovered else None,
        "longest_end_s": max(ended, default=None),
        "hangs": sum(bool(verdict.hangs) for verdict, _ in struck),
        "wrong": sum(bool(verdict.wrong) for verdict, _ in struck),
        "leaked": sum(bool(verdict.leaked) for verdict, _ in struck),
    }
