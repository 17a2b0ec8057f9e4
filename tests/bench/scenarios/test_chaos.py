"""The chaos bench: its summary, and that it sees what is wrong."""

from __future__ import annotations

import random

import pytest
from tests.support.requirements import requires

from trimtab.bench.scenarios.chaos.chaos import chaos
from trimtab.bench.scenarios.chaos.faults import FAULTS
from trimtab.bench.scenarios.chaos.sequence import Sequence, draw
from trimtab.bench.scenarios.chaos.training import STEPS
from trimtab.errors import TrimtabError

pytestmark = pytest.mark.timeout(400)


@requires(root=True, tools=["ip", "tc", "nsenter"])
@pytest.mark.soak
def test_the_summary_counts_what_struck_and_the_canary_is_flagged() -> None:
    seen: list[tuple[int, int]] = []
    result = chaos(
        seed=1,
        full=False,
        sequences=3,
        only=["kill_rank", "inf", "disk_full", "other_version"],
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [result.summary[key] for key in ("sequences", "hangs", "wrong", "leaked")] == [3, 0, 0, 0]
    assert result.summary["canary_flagged"] is True
    assert seen[-1] == (3, 3)
    by_fault = result.summary["by_fault"]
    assert isinstance(by_fault, dict)
    assert sum(by_fault.values()) == sum(row["times"] for row in result.rows) >= 3
    assert [row["method"] for row in result.rows] == ["kill_rank", "inf", "disk_full", "other_version"]


def test_ranks_that_do_not_end_are_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another canary: a rank is stopped and nobody continues it."""
    monkeypatch.setattr("trimtab.bench.scenarios.chaos.sequence.GRACE_S", 1.0)
    monkeypatch.setattr(
        "trimtab.bench.scenarios.chaos.processes.ForkedRanks.undo", lambda self, running: None
    )
    strikes = draw([FAULTS["stop_long"]], "data", random.Random(0))
    verdict = Sequence("data", strikes, seed=1).run()
    assert any("do not end" in text for text in verdict.hangs)


def test_strikes_are_in_order_and_inside_the_job() -> None:
    faults = [FAULTS[name] for name in ("kill_rank", "nan", "other_seed")]
    for seed in range(50):
        strikes = draw(faults, "data", random.Random(seed))
        assert strikes[0].fault.at_start
        assert strikes[0].step == 0
        assert [strike.step for strike in strikes] == sorted(strike.step for strike in strikes)
        assert max(strike.step for strike in strikes) < STEPS - 8


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(TrimtabError, match="there is no fault 'flood'; choose from kill_rank"):
        chaos(seed=0, full=False, sequences=1, only=["flood"], progress=lambda *_: None)
