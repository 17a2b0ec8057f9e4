"""Ranks run at the speed that was asked, and change it by schedule, measured against a free rank in one run."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest
from tests.emulate.machines import pair
from tests.support.requirements import requires

from trimtab.emulate import Emulation, parse_contention
from trimtab.emulate.competitor import niceness
from trimtab.emulate.layout import lay_out
from trimtab.emulate.quota import cpus
from trimtab.errors import TrimtabError

_SCRIPT = str(Path(__file__).with_name("speed_script.py"))
_WINDOWS, _WINDOW_S = 12, 0.5


@pytest.mark.parametrize(
    "throttle", [pytest.param("quota", marks=requires(root=True, cgroup=True)), "duty", "competitor", "gemm"]
)
def test_speed_and_contention(throttle: str) -> None:
    """0.4 of the free rank's rate, and half of that from step 4 to 8."""
    schedule = [parse_contention("b=0.5@4:8")]
    with Emulation(pair(speed=0.4), throttle=throttle, schedule=schedule) as emulation:
        assert emulation.throttle == throttle
        outcome = emulation.run([_SCRIPT, str(_WINDOWS), str(_WINDOW_S)], capture=True, timeout=100)
    assert outcome.failure is None
    assert outcome.steps == (_WINDOWS, _WINDOWS)
    windows = json.loads(outcome.stdout)
    # Only where the free rank had its core to itself is its rate the full one.
    rates = [slow / free if share > 0.9 else math.nan for (free, share), (slow, _) in windows]
    alone = [rate for rate in rates[:4] + rates[8:] if not math.isnan(rate)]
    contended = [rate for rate in rates[4:8] if not math.isnan(rate)]
    if len(alone) < 2 or len(contended) < 1:
        pytest.skip(f"the machine is busy with other work: the free rank did not get its core ({windows})")
    assert 0.3 <= statistics.median(alone) <= 0.5
    assert 0.13 <= statistics.median(contended) <= 0.27


def test_ranks_take_turns_where_cores_are_few() -> None:
    cluster = pair(speed=0.4)
    alone = lay_out(cluster, [4, 5, 6, 7, 8])
    assert [seat.cores for seat in alone] == [(4, 5), (6, 7)]
    assert [seat.sharing for seat in alone] == [1, 1]
    crowded = lay_out(cluster, [3])
    assert [(seat.cores, seat.slot, seat.sharing) for seat in crowded] == [((3,), 0, 2), ((3,), 1, 2)]
    # The proportion holds, and both together do not ask for more than the core.
    assert [cpus(seat.speed, 1, seat.sharing) for seat in crowded] == [0.5, 0.2]


def test_competitors_leave_the_asked_part() -> None:
    for speed in (0.9, 0.5, 0.4, 0.25, 0.1, 0.03):
        weight = sum(1.25**-nice for nice in niceness(speed))
        assert 1 / (1 + weight) == pytest.approx(speed, rel=0.08)
        assert all(0 <= nice <= 19 for nice in niceness(speed))
    assert niceness(1.0) == []


def test_refuses_a_throttle_that_is_not_there() -> None:
    with pytest.raises(
        TrimtabError, match="no throttle 'slow'; there are auto, quota, duty, competitor, gemm"
    ):
        Emulation(pair(), throttle="slow")
