"""The bench of stragglers: every method trains, the exact ones alike, and the figures have the agreed names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from trimtab.bench.harness import AA
from trimtab.bench.scenarios.straggler import bursts, links, straggler

if TYPE_CHECKING:
    from tests.support.pool import Pool

SMALL: dict[str, Any] = {"width": 32, "heads": 8, "layers": 1, "batch": 2, "length": 64, "device": "cpu"}
EXACT = {"even", "even" + AA, "shares", "migrate", "semi"}


def fixed(model: str) -> list[dict[str, Any]]:
    spec = {**SMALL, "model": model, "speeds": [1.0, 0.5], "repeats": 2, "settle": 3}
    spec["repeated"] = model == "gpt"
    return straggler.on_rank(spec, lambda done, total: None)


@pytest.mark.parametrize("model", ["gpt", "vit", "bert", "llama"])
def test_every_method_trains(ranks: Pool, model: str) -> None:
    rows = {row["method"]: row for row in ranks(2, fixed, model)[0]}
    assert rows.keys() == EXACT | {"resize-random", "resize-priority", "semi-resize", "ideal"}
    for method in EXACT:
        assert rows[method]["loss_gap"] < 1e-4, method
    assert rows["resize-random"]["loss_gap"] > 1e-4, "the comparison must see what is left out"
    trained = 3 + 2 + 2  # settling, warm-up and measured steps
    assert {method: row["steps"] for method, row in rows.items() if "steps" in row} == {
        method: trained if method in straggler.TRAINED else 4 for method in rows if method != "ideal"
    }
    assert rows["ideal"]["over_ideal"] == 1
    heads = 4 if model == "llama" else 8  # Llama's share keys in pairs
    for method in ("even", "migrate"):
        assert sorted(map(sum, rows[method]["units"].values())) == [heads, 128]


def contended() -> list[dict[str, Any]]:
    spec = {**SMALL, "model": "gpt", "speeds": [1.0, 1.0], "speed": 0.25, "start": 3, "end": 14, "steps": 25}
    return straggler.follow_contention(spec, lambda done, total: None)


def test_contention_has_figures_of_both_phases(ranks: Pool) -> None:
    rows = ranks(2, contended)[0]
    assert [row["method"] for row in rows] == list(straggler.CONTENDED)
    even, semi, _ = rows
    assert semi["loss_gap"] < 1e-4
    assert even["steps"] == semi["steps"] == 25
    assert "decisions" not in even
    figures = straggler._contention_figures(rows)
    assert figures["contention_speedup"] == even["step_ms"] / semi["step_ms"]
    assert figures["contention_semi_over_ideal"] == semi["over_ideal"]
    assert figures["contention_semi_over_ideal_after"] == semi["over_ideal_after"]


def burst() -> list[dict[str, Any]]:
    spec = {**SMALL, "model": "gpt", "speeds": [1.0, 1.0], "speed": 0.25, "slow": 4, "calm": 4, "rounds": 2}
    return bursts.on_rank({**spec, "balance": bursts._BALANCE}, lambda done, total: None)


def test_methods_train_alike_through_bursts(ranks: Pool) -> None:
    rows = ranks(2, burst)[0]
    assert [row["method"] for row in rows] == list(bursts.METHODS)
    assert max(row["loss_gap"] for row in rows) < 1e-4
    modes = {row["method"]: {each["mode"] for each in row.get("decisions", [])} for row in rows}
    assert "lease" not in modes["own"]
    assert "own" not in modes["lease"]


def test_figures_are_taken_from_the_rows_that_they_name() -> None:
    rows = [
        {"method": method, "step_ms": ms, "over_ideal": ms / 2.0, "loss_gap": ms / 100, "reaction_steps": 7}
        for method, ms in (("even", 4.0), ("even" + AA, 5.0), ("semi", 3.0), ("semi-resize", 2.0))
    ]
    rows[2]["watching_over_step"] = 0.01
    assert straggler._static_figures("x", rows) == {
        "x_even_over_ideal": 2.0,
        "x_semi_over_ideal": 1.5,
        "x_reaction_steps": 7,
        "x_semi_loss_gap": 0.03,
        "x_semi_resize_over_ideal": 1.0,
        "x_aa_ratio": 1.25,
    }
    worse = {"method": "semi", "over_ideal": 1.7, "loss_gap": 0.0, "reaction_steps": 9}
    assert straggler._overall([*rows, worse]) == {
        "semi_over_ideal": 1.7,
        "reaction_steps": 9,
        "semi_loss_gap": 0.03,
        "watching_over_step": 0.01,
    }
    assert straggler._overall(rows[:2]) == {}, "settings without the controller have no such figures"


def linked() -> list[dict[str, Any]]:
    return links.on_rank({**links._SPEC, **SMALL, "steps": 20}, lambda done, total: None)


def test_a_link_has_both_choices_measured(ranks: Pool) -> None:
    rows = {row["method"]: row for row in ranks(2, linked)[0]}
    assert rows.keys() == {"even", "migrate", "resize", "semi-resize"}
    assert [method for method, row in rows.items() if row["move_ms"]] == ["migrate"]
    assert rows["migrate"]["final_loss"] == pytest.approx(rows["even"]["final_loss"], abs=1e-4)
    assert rows["resize"]["final_loss"] != rows["even"]["final_loss"], "half of it was left out"
    chosen, decided_at = rows["semi-resize"]["chosen"], rows["semi-resize"]["decided_at"]
    assert chosen in ("nothing", "migrate", "resize", "both")
    assert (decided_at is None) == (chosen == "nothing")


def test_settling_is_where_steps_stay_short() -> None:
    seconds = [4.0] * 20 + [1.0] * 20
    assert straggler.settled_after(seconds, 8) == 18
    assert straggler.settled_after([1.0] * 8, 3) == 0
    assert straggler.settled_after([9.0] * 8 + [1.0], 1) == 9
