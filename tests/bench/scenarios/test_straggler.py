"""The bench of stragglers: every method trains, the exact ones alike, and the figures have the agreed names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from trimtab.bench.harness import AA
from trimtab.bench.scenarios.straggler import link as straggler_link
from trimtab.bench.scenarios.straggler import straggler

if TYPE_CHECKING:
    from tests.support.pool import Pool

SMALL: dict[str, Any] = {"width": 32, "heads": 8, "layers": 1, "batch": 2, "length": 64, "device": "cpu"}
EXACT = {"even", "even" + AA, "shares", "migrate", "semi"}


def fixed(model: str) -> list[dict[str, Any]]:
    spec = {**SMALL, "model": model, "speeds": [1.0, 0.5], "repeats": 2, "settle": 3}
    return straggler.on_rank(spec, lambda done, total: None)


@pytest.mark.parametrize("model", ["gpt", "vit"])
def test_every_method_trains(ranks: Pool, model: str) -> None:
    rows = {row["method"]: row for row in ranks(2, fixed, model)[0]}
    assert rows.keys() == EXACT | {"resize-random", "resize-priority", "semi-resize", "ideal"}
    for method, row in rows.items():
        assert row["step_ms"] > 0
        assert row["over_ideal"] > 0
        if method in EXACT:
            assert row["loss_gap"] < 1e-4, method
    assert rows["resize-random"]["loss_gap"] > 1e-4, "the comparison must see what is left out"
    figures = straggler._static_figures("x", list(rows.values())) | straggler._overall(list(rows.values()))
    assert {"semi_over_ideal", "reaction_steps", "semi_loss_gap", "watching_over_step"} <= figures.keys()


def contended() -> list[dict[str, Any]]:
    spec = {**SMALL, "model": "gpt", "speeds": [1.0, 1.0], "speed": 0.25, "start": 3, "end": 14, "steps": 25}
    return straggler.follow_contention(spec, lambda done, total: None)


def test_contention_has_figures_of_both_phases(ranks: Pool) -> None:
    rows = ranks(2, contended)[0]
    assert [row["method"] for row in rows] == list(straggler.CONTENDED)
    figures = straggler._contention_figures(rows)
    assert all(value >= 0 for value in figures.values())
    assert figures["contention_semi_loss_gap"] < 1e-4


def linked() -> list[dict[str, Any]]:
    return straggler_link.on_rank({**straggler_link._SPEC, **SMALL, "steps": 20}, lambda done, total: None)


def test_a_link_has_both_choices_measured(ranks: Pool) -> None:
    rows = {row["method"]: row for row in ranks(2, linked)[0]}
    assert rows.keys() == {"even", "migrate", "resize", "semi-resize"}
    assert rows["migrate"]["move_ms"] > 0
    assert rows["semi-resize"]["chosen"] in ("nothing", "migrate", "resize", "both")


def test_settling_is_where_steps_stay_short() -> None:
    taken = [4.0] * 20 + [1.0] * 20
    assert straggler.settled_after(taken, 8) == 18
    assert straggler.settled_after([1.0] * 8, 3) == 0
    assert straggler.settled_after([9.0] * 8 + [1.0], 1) == 9
