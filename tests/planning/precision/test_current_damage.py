"""Damages that follow what is sampled, and the plans made from them."""

from __future__ import annotations

import pytest
from tests.planning.planning import SLOW, planned, uneven

from trimtab.planning.plan import Plan
from trimtab.planning.precision.current_damage import growth, with_current_damages
from trimtab.planning.replan import replan
from trimtab.predict.damage import Sensitivity


def sensitivity(size: float, **errors: float) -> Sensitivity:
    return Sensitivity(size=size, errors=errors)


def test_damage_grows_with_the_error_and_with_the_part_of_all_sizes() -> None:
    first = {"a": sensitivity(1.0, int8=0.1), "b": sensitivity(1.0, int8=0.1, bf16=0.0)}
    assert growth(first, first) == {"a": {"int8": 1.0}, "b": {"int8": 1.0, "bf16": 1.0}}
    # All gradients ten times as large: relative to the whole, nothing has changed.
    larger = {name: sensitivity(10 * own.size, **own.errors) for name, own in first.items()}
    assert growth(first, larger) == growth(first, first)
    coarser = {**first, "a": sensitivity(1.0, int8=0.4)}
    assert growth(first, coarser)["a"]["int8"] == pytest.approx(4.0)
    shifted = {"a": sensitivity(3.0, int8=0.1), "b": sensitivity(1.0, int8=0.1)}
    grown = growth(first, shifted)
    assert grown["a"]["int8"] == pytest.approx(1.5)
    assert grown["b"]["int8"] == pytest.approx(0.5)


def test_what_was_not_sampled_twice_stays() -> None:
    first = {"a": sensitivity(1.0, int8=0.1), "b": sensitivity(0.0, int8=0.1)}
    assert growth(first, {}) == {}
    assert growth(first, {"a": sensitivity(2.0, int8=0.1), "c": sensitivity(1.0)}) == {"a": {"int8": 1.0}}
    assert "b" not in growth(first, {"a": first["a"], "b": sensitivity(1.0, int8=0.1)})


def lowered(plan: Plan) -> dict[str, str]:
    return plan.roles[SLOW].precisions


@pytest.mark.parametrize(("batch", "slower"), [("fixed", 1.0), ("free", 1.2)])
def test_an_operator_that_became_sensitive_is_raised_at_the_next_plan(batch: str, slower: float) -> None:
    """What is lowered does a thousand times the damage by then; planned anew with and without that."""
    plan = planned(uneven(1.04), batch=batch, layout="data")
    drift = {SLOW: plan.roles[SLOW].compute_s * slower}
    usual = replan(plan, drift)
    assert lowered(usual)
    sensitive = next(iter(lowered(usual)))
    grown = {sensitive: dict.fromkeys(plan.roles[SLOW].choices[sensitive], 1000.0)}
    current = with_current_damages(plan, grown)
    assert current.hash == plan.hash, "what the ranks do is the same until the next plan"
    for precision, choice in current.roles[SLOW].choices[sensitive].items():
        assert choice.damage == pytest.approx(1000 * plan.roles[SLOW].choices[sensitive][precision].damage)
    new = replan(current, drift)
    assert new.hash != usual.hash
    assert lowered(new).get(sensitive) != lowered(usual)[sensitive]
    assert with_current_damages(plan, {}) is plan
