"""The bench of the predictor: its figures, and one small job end to end."""

from __future__ import annotations

import pytest

from trimtab.bench.scenarios.predict.predict import (
    LINKS,
    MODELS,
    PLANS,
    PROBED,
    UNITS,
    Plan,
    _row,
    predict_jobs,
    regret,
    summary,
)


def test_at_least_twelve_plans_of_three_models_are_held_out() -> None:
    assert len(MODELS["cpu"]) >= 3
    assert sum(len(PLANS[link]) for link in LINKS["cpu"]) * len(MODELS["cpu"]) >= 12
    for link in LINKS["cpu"]:
        assert {sum(plan.shares) for plan in PLANS[link]} == {UNITS}, "unlike batches cannot be compared"


@pytest.mark.parametrize("link", list(PLANS))
def test_no_plan_computes_what_was_probed(link: str) -> None:
    # Probed are steps in one precision throughout.
    assert not [p for p in PLANS[link] if p.shares[0] in PROBED and p.low in ("none", "all")]


def test_an_error_is_of_each_round_with_itself() -> None:
    # The machine is three times slower in the second half, and so are the probes.
    found = {
        "predicted": [1.1, 1.1, 3.3, 3.3],
        "naive": [0.5, 0.5, 1.5, 1.5],
        "measured": [1.0, 1.0, 3.0, 3.0],
        "again": [1.0, 1.0, 3.0, 3.0],
        "bottleneck": "the link",
    }
    row = _row(Plan((4, 4), "half", 4), found)
    assert row["error"] == pytest.approx(0.1)
    assert row["naive_error"] == pytest.approx(-0.5)
    assert row["repeat_error"] == 0
    assert row["plan"] == "4/4, low half, 4 bits"


def test_regret_is_what_the_choice_costs() -> None:
    rows = [
        {"predicted_ms": 10.0, "measured_ms": 12.0},
        {"predicted_ms": 11.0, "measured_ms": 10.0},
        {"predicted_ms": 20.0, "measured_ms": 30.0},
    ]
    assert regret(rows) == pytest.approx(0.2)
    assert regret(rows[1:]) == 0


def test_errors_count_without_their_sign() -> None:
    rows = [
        {
            "model": m,
            "link": "x",
            "error": e,
            "naive_error": 0.3,
            "repeat_error": -0.02,
            "predicted_ms": 1.0,
            "measured_ms": 1.0,
        }
        for m, e in (("a", 0.1), ("b", -0.2))
    ]
    found = summary(rows)
    assert found["mean_error"] == pytest.approx(0.15)
    assert found["max_error"] == pytest.approx(0.2)
    assert found["repeat_error"] == pytest.approx(0.02)
    assert found["regret"] == 0


def test_a_memory_error_has_its_sign() -> None:
    found = {"predicted": [1.0], "naive": [1.0], "measured": [1.0], "again": [1.0], "bottleneck": ""}
    row = _row(Plan((4, 4), "half", 4), {**found, "memory": [1.02, 0.9]})
    assert row["memory_error"] == pytest.approx(-0.1)
    rows = [{"model": "a", "link": "x", **row, "memory_error": error} for error in (-0.1, 0.05)]
    assert summary(rows)["memory_error"] == pytest.approx(0.1)


def test_jobs_end_to_end() -> None:
    rows = predict_jobs("cpu", ["conv", "conv"], "none", [Plan((1, 1), "half", 4)], 1)
    assert len(rows) == 2
    for row in rows:
        assert row["predicted_ms"] > 0
        assert row["measured_ms"] > 0
        assert abs(row["error"]) < 10, "predicted and measured are of the same step"
