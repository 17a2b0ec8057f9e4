"""Ranks run at the requested speed and follow the schedule, measured against a free rank in one run."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path

import pytest
from tests.emulate.machines import pair
from tests.support.requirements import requires

from trimtab.emulate import Emulation, parse_contention
from trimtab.emulate.placement import place_ranks
from trimtab.emulate.throttling.cgroups import Group, cpus
from trimtab.emulate.throttling.competitor import niceness
from trimtab.errors import TrimtabError

_SCRIPT = str(Path(__file__).with_name("speed_script.py"))
_WINDOWS, _WINDOW_S = 10, 0.4
_QUOTA = pytest.param("quota", marks=requires(root=True, cgroup=True))


@pytest.mark.parametrize("throttle", [_QUOTA, "duty", "competitor", "gemm"])
def test_speed_and_contention(throttle: str) -> None:
    """Host a has 0.4 of its speed in every other step, host b in all of them.

    Cores differ from one another and from one minute to the next, so a is compared with
    itself in the step before; b, whose speed is its device's, with a.
    """
    schedule = [parse_contention(f"a=0.4@{step}:{step + 1}") for step in range(1, _WINDOWS, 2)]
    with Emulation(pair(speed=0.4), throttle=throttle, schedule=schedule) as emulation:
        assert emulation.throttle == throttle
        outcome = emulation.run([_SCRIPT, str(_WINDOWS), str(_WINDOW_S)], capture=True, timeout=100)
    assert outcome.failure is None
    assert outcome.steps == (_WINDOWS, _WINDOWS)
    windows = json.loads(outcome.stdout)
    # Where the free rank did not have its core to itself, its rate is not the full one.
    pairs = [(free, slow) for free, slow in zip(windows[::2], windows[1::2], strict=True) if free[0][1] > 0.9]
    if len(pairs) < 3:
        had = ", ".join(f"{free[0][1]:.2f}" for free in windows[::2])
        pytest.skip(f"the machine is busy with other work: of its core the free rank had only {had}")
    ratios = [slow[0][0] / free[0][0] for free, slow in pairs]
    assert 0.3 <= statistics.median(ratios) <= 0.5, ratios
    steady = [slow[1][0] / slow[0][0] for _, slow in pairs]
    assert 0.5 <= statistics.median(steady) <= 2.0, steady


def test_ranks_take_turns_where_cores_are_few() -> None:
    cluster = pair(speed=0.4)
    alone = place_ranks(cluster, [4, 5, 6, 7, 8])
    assert [placement.cores for placement in alone] == [(4, 5), (6, 7)]
    assert [placement.sharing for placement in alone] == [1, 1]
    crowded = place_ranks(cluster, [3])
    assert [(placement.cores, placement.slot, placement.sharing) for placement in crowded] == [
        ((3,), 0, 2),
        ((3,), 1, 2),
    ]
    # The proportion holds, and both together do not ask for more than the core.
    assert [cpus(placement.speed, 1, placement.sharing) for placement in crowded] == [0.5, 0.2]


@requires(root=True, cgroup=True)
def test_ranks_on_one_core_do_not_lend_each_other_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slowed down by repeated products, each has its part of the core and no more, also when the speed changes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    schedule = [parse_contention("a=0.5@1:2")]
    with Emulation(pair(speed=0.4), throttle="gemm", schedule=schedule) as emulation:
        groups = emulation._throttle.groups
        assert [_part(groups[rank]) for rank in (0, 1)] == [0.5, 0.5]
        outcome = emulation.run([_SCRIPT, "3", "0.05"], capture=True, timeout=100)
        assert outcome.failure is None
        assert [_part(groups[rank]) for rank in (0, 1)] == [0.5, 0.5]
    with Emulation(pair(speed=0.4), throttle="duty") as emulation:
        assert not emulation._throttle.groups


def _part(group: Group) -> float:
    """Of a CPU's time that the group may use."""
    if group.version == 2:
        quota, period = group.read("cpu.max").split()
    else:
        quota, period = group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us")
    return int(quota) / int(period)


def test_competitors_leave_the_asked_part() -> None:
    for speed in (0.9, 0.5, 0.4, 0.25, 0.1, 0.03):
        weight = sum(1.25**-nice for nice in niceness(speed))
        assert 1 / (1 + weight) == pytest.approx(speed, rel=0.08)
        assert all(0 <= nice <= 19 for nice in niceness(speed))
    assert niceness(1.0) == []


def test_refuses_a_throttle_that_is_not_there() -> None:
    with pytest.raises(
        TrimtabError, match="no throttle 'slow'; choose from auto, quota, duty, competitor, gemm"
    ):
        Emulation(pair(), throttle="slow")
