"""The bench of hybrid ranks: every method trains what it says, and the figures are read rightly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.control.plans.plan_cases import net, plan_for

from trimtab.bench.harness import AA
from trimtab.bench.scenarios.hybrid import loss as hybrid_loss
from trimtab.bench.scenarios.hybrid.hybrid import _allocator, figures
from trimtab.bench.scenarios.hybrid.loss import CANARY, runs
from trimtab.bench.scenarios.hybrid.ranks import METHODS, UNTRAINED, on_rank
from trimtab.control.plans.active_plan import plan_text

if TYPE_CHECKING:
    from tests.support.pool import Pool

SIZE = (64, 1, 16, 4)
SPEC: dict[str, Any] = {
    "device": "cpu",
    "speeds": (1.0, 0.5),
    "memory": None,
    "repeats": 1,
    "warmup": 1,
    "block": 2,
    "size": SIZE,
}


def measured(changes: dict[str, Any]) -> dict[str, Any]:
    return on_rank({**SPEC, **changes}, lambda done, total: None)


def lost(spec: dict[str, Any]) -> dict[str, list[float]]:
    return hybrid_loss.on_rank(spec, lambda done, total: None)


def test_every_method_trains_as_it_says_and_on_to_its_loss(ranks: Pool) -> None:
    found = ranks(2, measured, {}, allow_groups=True)[0]
    rows = {row["method"]: row for row in found["rows"]}
    assert tuple(rows) == METHODS
    assert all(row["samples_per_s"] > 0 and row["fraction_of_ideal"] > 0 for row in rows.values())
    assert rows["uniform-low"]["operators_lowered"] >= rows["trimtab-fixed"]["operators_lowered"]
    for method in ("ddp", "shares"):
        assert rows[method]["operators_lowered"] == 0
        assert rows[method]["gradient_error"] < 1e-5
    for method, row in rows.items():
        if method not in UNTRAINED and row["operators_lowered"]:
            assert 1e-5 < row["gradient_error"] < 0.5
    assert figures(rows, found)["free_over_ddp"] > 0
    todo, of = runs({"pair": found})
    spec = {"device": "cpu", "runs": todo, "seeds": 2, "steps": 2, "size": SIZE}
    finals = ranks(2, lost, spec, allow_groups=True)[0]
    judged = hybrid_loss.judged(finals)
    assert set(of["pair"]) == {"ddp", "uniform-low", "shares", "trimtab-fixed", "trimtab"}
    assert all(0 < judged[name]["final_loss"] < 10 for name in (*of["pair"].values(), CANARY, "ddp" + AA))
    if rows["shares"]["shares"] != rows["ddp"]["shares"]:
        assert judged[of["pair"]["shares"]]["gap"] == pytest.approx(0, abs=1e-3)


def test_what_does_not_fit_is_not_run(ranks: Pool) -> None:
    """A model whose activations outweigh its parameters, on a rank that has too little memory for them."""
    found = ranks(2, measured, {"memory": 0.3, "size": (64, 1, 64, 16)}, allow_groups=True)[0]
    rows = {row["method"]: row for row in found["rows"]}
    assert not rows["ddp"]["fits"]
    assert rows["ddp"]["samples_per_s"] is None
    for method in ("trimtab-fixed", "trimtab"):
        assert rows[method]["fits"]
        assert rows[method]["samples_per_s"] > 0


def test_equal_runs_are_trained_once() -> None:
    text = plan_text(plan_for(net()))
    ways = {
        "ddp": {"precisions": [{}, {}], "samples": [24, 24]},
        "uniform-low": {"precisions": [{}, {"up": "int8"}], "samples": [24, 24]},
        "shares": {"precisions": [{}, {}], "samples": [30, 18]},
    }
    of_cluster = {"ways": ways, "plans": {"trimtab": text}}
    todo, of = runs({"a": of_cluster, "b": of_cluster})
    assert list(todo) == ["ddp", "ddp" + AA, "a uniform-low", "a shares", CANARY]
    assert of["a"] == of["b"] == {"ddp": "ddp", "uniform-low": "a uniform-low", "shares": "a shares"}


def test_the_allocator_is_graded_on_what_was_measured() -> None:
    several = {"own": [4.0, 0.0], "bf16": [2.5, 1.0], "int8": [1.0, 6.0]}
    choices = {f"layer{i}": {p: [s, d * (i + 1)] for p, (s, d) in several.items()} for i in range(6)}
    found = _allocator({"a": {"choices": {"slow": choices}}})
    assert found["allocator_gaps"] == 5
    assert 0 <= found["allocator_worst_gap"] <= 0.02
