"""The comparison of losses on made-up figures, and the order in which methods and seeds are trained."""

from __future__ import annotations

import math

import pytest

from trimtab.bench.harness import AA
from trimtab.bench.losses import DIVERGED, compare, final_losses, judged
from trimtab.bench.scenarios.loss import CANARY, METHODS


def made_up(**losses: list[float]) -> dict[str, list[float]]:
    equal = [2.0, 2.01, 1.99]
    return {
        method: losses.get(method, [x + 0.001 for x in equal] if method != "fp32" else equal)
        for method in METHODS
    }


def test_the_comparison_flags_damage_and_nothing_else() -> None:
    rows = judged(made_up(**{CANARY: [2.0, 2.01, 50.0], "2": [2.1, 2.12, 2.09]}))
    assert rows[CANARY]["worse"]
    assert rows["2"]["worse"]
    assert not any(
        rows[method]["worse"] for method in ("fp32", "fp32" + AA, "8", "4", "4-nearest", "2-feedback")
    )


def test_a_gap_is_taken_seed_by_seed_and_measured_against_the_noise() -> None:
    base, again, method = [1.0, 2.0, 3.0], [1.1, 2.0, 2.9], [1.5, 2.4, 3.6]
    row = compare({"a": base, "a" + AA: again, "b": method})[2]
    assert row["method"] == "b"
    assert row["gap"] == pytest.approx(0.5)
    assert row["final_loss"] == pytest.approx(2.5)
    # The standard error of the baseline over seeds, which is larger than that of the A/A row's gap.
    assert row["gap_over_noise"] == pytest.approx(0.5 / (1 / math.sqrt(3)))
    assert not row["worse"]
    assert compare({"a": base, "a" + AA: again, "b": [x + 2 for x in base]})[2]["worse"]
    # A noisy A/A row raises the bar.
    assert not compare({"a": base, "a" + AA: [3.0, 2.0, 1.0], "b": [x + 2 for x in base]})[2]["worse"]


def test_every_method_is_trained_with_every_seed_and_the_a_a_row_on_other_data() -> None:
    calls: list[tuple[str, int, int]] = []

    def train(method: str, seed: int, data_seed: int) -> float:
        calls.append((method, seed, data_seed))
        return math.nan if method == "bad" else float(seed)

    moves: list[tuple[int, int]] = []
    finals = final_losses(["a", "a" + AA, "bad"], [3, 4], train, lambda *at: moves.append(at))
    assert calls == [(m, s, s + 1000 * m.endswith(AA)) for s in (3, 4) for m in ("a", "a" + AA, "bad")]
    assert finals == {"a": [3.0, 4.0], "a" + AA: [3.0, 4.0], "bad": [DIVERGED, DIVERGED]}
    assert moves == [(done, 6) for done in range(1, 7)]
