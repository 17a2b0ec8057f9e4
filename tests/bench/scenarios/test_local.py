"""The bench of local steps: rows of timed and trained methods are joined, and times to a loss are read rightly."""

from __future__ import annotations

import pytest
from tests.support.requirements import requires

from trimtab.bench.harness import AA
from trimtab.bench.scenarios.local.loss import CANARY
from trimtab.bench.scenarios.local.rows import joined, local, of_link, rounds, steps_to
from trimtab.bench.scenarios.local.speed import SPEED

KEYS = {
    *("link", "workers", "speeds", "method", "samples_per_s", "over_ddp", "fraction_of_ideal"),
    *("loss_at_equal_samples", "gap", "time_to_loss_s", "wire_mb_per_step"),
}


def test_steps_to_a_loss() -> None:
    curve = [5.0, 4.0, 3.0, 2.5]
    assert steps_to(3.5, curve, 400) == pytest.approx(250), "half way from the second to the third"
    assert steps_to(5.0, curve, 400) == pytest.approx(100)
    assert steps_to(2.0, curve, 400) is None


def test_rows_of_a_link() -> None:
    curves = {
        "ddp": [[4.0, 2.0], [4.0, 2.1]],
        "ddp" + AA: [[4.0, 2.01], [4.0, 2.09]],
        "trimtab": [[4.0, 2.0]] * 2,
        **{key: [[4.0, 2.02], [4.0, 2.1]] for key in ("4 bits every 20", "2 bits every 15")},
        CANARY: [[4.0, 3.5], [4.0, 3.6]],
    }
    timed = [
        {
            "method": method,
            "samples_per_s": 2.0,
            "over_ddp": 1.0,
            "fraction_of_ideal": 1.0,
            "wire_mb_per_step": 0.0,
            "step_s": 0.5,
        }
        for method in SPEED
    ]
    speed = {"rows": timed, "every": 20, "every2": 12, "bits": 4, "explain": "", "predicted_s": 0.5}
    local_of = rounds(speed, 2)
    assert rounds({**speed, "every2": None}, 2) == {"local": (4, 20)}, "2 bits were not timed"
    assert rounds(None, 4) == {"local": (4, 15)}, "four workers that were not timed"
    rows, figures = joined("100mbit", 2, speed, of_link(curves, local_of), 100, local_of)
    by_method = {row["method"]: row for row in rows}
    assert set(by_method) == {*SPEED, CANARY}
    assert set(by_method["local"]) >= KEYS
    assert by_method["local"]["gap"] == pytest.approx(0.01 / 2.05)
    assert by_method["local"]["time_to_loss_s"] < 50
    assert by_method[CANARY]["time_to_loss_s"] is None, "it never gets there"
    assert (by_method["local2bit"]["trained_every"], by_method["ddp"]["trained_every"]) == (15, None)
    assert figures["100mbit x2 canary_flagged"]
    assert not by_method["local"]["worse"]


@pytest.mark.soak
@pytest.mark.timeout(300)
@requires(root=True, tools=["ip", "tc", "nsenter"])
def test_the_whole_bench_with_tiny_settings() -> None:
    result = local(
        links=["1gbit"],
        workers=[2],
        full=False,
        only=[],
        repeats=2,
        steps=20,
        seeds=2,
        samples=4,
        progress=lambda done, total: None,
        model={"width": 64, "layers": 2, "heads": 4, "context": 64},
    )
    rows = {(row["speeds"], row["method"]): row for row in result.rows}
    assert {method for speeds, method in rows if speeds == "1/1/1/1"} == {*SPEED, CANARY}
    assert {method for speeds, method in rows if speeds == "1/1"} == {*SPEED, CANARY}
    assert {method for speeds, method in rows if speeds == "1/0.4"} == {
        *("ddp", "local", "local, unequal steps", "ideal")
    }
    assert set(rows["1/1", "local"]) >= KEYS
    for speeds in ("1/1", "1/1/1/1"):
        assert rows[speeds, "local"]["wire_mb_per_step"] > 0
        assert {*KEYS} <= set(rows[speeds, "local"])
