"""Every fault of `docs/faults.md` that strikes a running job: it goes on, or ends on all ranks and resumes.

The job, the faults and the verdict are those of `trimtab bench chaos`. The job must come to the result of one without
faults, with the same bits on every rank, within its own timeout, and leave nothing behind.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.support.requirements import requires

from trimtab.bench.ranks import hosts
from trimtab.bench.scenarios.chaos.faults import CANARY, FAULTS, Fault
from trimtab.bench.scenarios.chaos.sequence import Sequence, Verdict, draw
from trimtab.emulate import Emulation

pytestmark = [requires(root=True, tools=["ip", "tc", "nsenter"]), pytest.mark.timeout(300)]

SHORT = ["kill_rank", "cut_3s", "nan"]
LONG_STOP = replace(FAULTS["stop"], name="stop", does="a rank stops for 20 s", seconds=20.0, timeout_s=60.0)


class Cluster:
    """Emulated hosts, and what each job comes to without a fault."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._oracles: dict[str, Mapping[str, Any]] = {}

    def run(self, job: str, faults: list[Fault]) -> Verdict:
        if job not in self._oracles:
            verdict = Sequence(job, [], seed=1, emulation=self._emulation).run()
            assert troubles(verdict) == []
            self._oracles[job] = verdict.parameters
        strikes = draw(faults, job, random.Random(str([fault.name for fault in faults])))
        sequence = Sequence(job, strikes, seed=1, emulation=self._emulation, oracle=self._oracles[job])
        return sequence.run()


def troubles(verdict: Verdict) -> list[str]:
    return verdict.hangs + verdict.wrong + verdict.leaked


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Emulation(hosts((1.0,) * 4, link="1gbit")) as emulation:
        yield Cluster(emulation)


def check(verdict: Verdict) -> None:
    assert troubles(verdict) == []
    assert all(strike.at is not None for strike in verdict.strikes), "the fault did not strike"
    assert all(strike.recovered_s is not None for strike in verdict.strikes)


@pytest.mark.parametrize("name", SHORT)
def test_a_job_goes_on_or_ends_and_resumes(cluster: Cluster, name: str) -> None:
    check(cluster.run("data", [FAULTS[name]]))


@pytest.mark.soak
def test_several_faults_in_one_job_with_moving_units(cluster: Cluster) -> None:
    check(cluster.run("tensor", [FAULTS["kill_rank"], FAULTS["nan"], FAULTS["terminate"]]))


def test_a_wrong_replica_is_seen(cluster: Cluster) -> None:
    """The canary: without it the tests above would prove nothing."""
    assert any("differ" in text for text in cluster.run("data", [CANARY]).wrong)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "job"), [(fault.name, job) for fault in FAULTS.values() for job in fault.jobs]
)
def test_every_fault_in_every_job(cluster: Cluster, name: str, job: str) -> None:
    check(cluster.run(job, [FAULTS[name]]))


@pytest.mark.soak
def test_a_rank_that_is_stopped_for_20_seconds(cluster: Cluster) -> None:
    check(cluster.run("data", [LONG_STOP]))
