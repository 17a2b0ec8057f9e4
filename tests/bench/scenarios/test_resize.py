"""The comparisons of resizing, reduced to seconds: they run, and the rows say what they should."""

from __future__ import annotations

import pytest

from trimtab.bench.scenarios.straggler.resize_loss import BEGINS, CANARY, METHODS, resize_loss, rows_of


@pytest.mark.soak
def test_losses_of_two_ranks() -> None:
    rows = {row["method"]: row for row in resize_loss(BEGINS + 4, 2, lambda done, total: None)}
    assert rows.keys() == {*METHODS, "priority over random"}
    even, random, priority = (rows[name]["losses"] for name in ("even", "resize-random", "resize-priority"))
    assert len({*even, *random, *priority}) == 6, "each leaves out something else"
    assert all(abs(a - b) < 0.5 for a, b in zip(even, priority, strict=True)), "and all of them train"


def test_rows_compare_seed_by_seed() -> None:
    finals = {
        "even": [1.0, 1.1],
        "even (again)": [1.01, 1.09],
        "resize-random": [1.2, 1.4],
        "resize-priority": [1.1, 1.45],
        CANARY: [3.0, 3.0],
    }
    *rows, between = rows_of(finals)
    by_method = {row["method"]: row for row in rows}
    assert by_method["resize-priority"]["gap"] == pytest.approx(0.225)
    assert by_method[CANARY]["worse"]
    assert not by_method["even (again)"]["worse"]
    assert between["gap"] == pytest.approx(-0.025)
    assert between["better_seeds"] == 1
