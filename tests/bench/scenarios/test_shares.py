"""The bench of batch shares: methods that train alike agree, the canary does not, and reactions are read rightly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from trimtab.bench.scenarios.shares import CANARY, METHODS, _figures, on_rank, reaction
from trimtab.bench.trainer import lost

if TYPE_CHECKING:
    from tests.support.pool import Pool

SPEC = {"device": "cpu", "speeds": (1.0, 0.4), "warmup": 0, "repeats": 1, "block": 3}


def measured(model: str) -> list[dict[str, Any]]:
    return on_rank({**SPEC, "model": model}, lambda done, total: None)


@pytest.mark.parametrize("model", ["gpt", pytest.param("digits", marks=pytest.mark.soak)])
def test_methods_train_alike_and_the_canary_does_not(ranks: Pool, model: str) -> None:
    rows = {row["method"]: row for row in ranks(2, measured, model)[0]}
    assert set(rows) == {*METHODS["cpu"], CANARY}
    for method in METHODS["cpu"]:
        assert rows[method]["samples_per_s"] > 0
        assert rows[method]["fraction_of_ideal"] > 0
    exact = rows["ddp"]["final_loss"]
    assert rows["shares"]["final_loss"] == pytest.approx(exact, abs=1e-5)
    assert not abs(rows[CANARY]["final_loss"] - exact) < 2e-5
    first, second = map(int, rows[CANARY]["shares"].split("/"))
    assert first > 2 * second
    assert rows["ideal"]["fraction_of_ideal"] == 1
    assert rows["shares"].keys() >= {"lost_to_balance", "lost_to_variation", "lost_to_exchange"}
    figures = _figures("x", rows)
    assert figures["x_over_ddp"] == rows["shares"]["samples_per_s"] / rows["ddp"]["samples_per_s"]
    assert figures["x_loss_gap"] < figures["x_canary_gap"]


def test_reactions() -> None:
    parts = [0.5] * 24 + [0.4] * 5 + [0.3] * 31 + [0.4] * 8 + [0.5] * 32
    figures = reaction(parts, 20, 60)
    assert figures["reaction_steps"] == 9
    assert figures["recovery_steps"] == 8
    assert figures["contention_share_during"] == pytest.approx(0.3)


def test_what_is_missing_to_the_ideal_is_divided() -> None:
    parts = lost([(0.5, 0.4), (0.5, 0.6), (0.5, 0.2)], step_s=1.0, ideal_s=0.4)
    assert parts["lost_to_balance"] == pytest.approx(0.1)
    assert parts["lost_to_variation"] == pytest.approx(0.1 / 3), "in one step the other rank is slower"
    assert sum(parts.values()) == pytest.approx(1 - 0.4 / 1.0), "nothing is left out"
