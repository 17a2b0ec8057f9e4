"""New plans from the choices of the old one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.planning import BETWEEN, FAST, SLOW, planned, three, uneven

from trimtab.errors import TrimtabError
from trimtab.planning.replan import MIN_SPEEDUP, SPARED, devices_of, plan_for_ranks, replan

if TYPE_CHECKING:
    from trimtab.planning.plan import Plan


def observed(plan: Plan, **times: float) -> dict[str, float]:
    return {name: plan.roles[name].compute_s * factor for name, factor in times.items()}


@pytest.mark.parametrize("batch", ["fixed", "free"])
@pytest.mark.parametrize("slower", [1.0, 1.3, 3.0])
def test_what_goes_as_predicted_is_not_changed(batch: str, slower: float) -> None:
    plan = planned(uneven(slower), 12, batch=batch)
    assert replan(plan, {}) is plan
    assert replan(plan, observed(plan, **dict.fromkeys(plan.roles, 1.0))) is plan
    assert replan(plan, observed(plan, **dict.fromkeys(plan.roles, 1.7))) is plan, "all alike slower"


def test_free_shares_follow_a_rank_that_became_slower() -> None:
    plan = planned(uneven(1.0), 12, budget=0.0)
    assert plan.shares == (6, 6)
    new = replan(plan, observed(plan, slow=2.0))
    assert new.shares == (8, 4)
    assert (new.model, new.ranks, new.batch, new.budget, new.bits) == (
        plan.model,
        plan.ranks,
        plan.batch,
        plan.budget,
        plan.bits,
    )
    assert new.batch_size == plan.batch_size
    assert new.hash != plan.hash
    assert new.reasons[-1] == "replanned during training: slow took 2 times the predicted time"
    assert replan(new, {}) is new
    # And back again, when it recovers.
    back = replan(new, observed(new, slow=0.5))
    assert back.shares == plan.shares
    assert len(back.reasons) == len(new.reasons)


def test_fixed_shares_stay_and_precision_follows() -> None:
    plan = planned(uneven(1.04), batch="fixed")
    slower = replan(plan, observed(plan, slow=1.2))
    assert slower.shares == plan.shares
    assert len(slower.roles[SLOW].precisions) > len(plan.roles[SLOW].precisions)
    assert slower.roles[FAST].precisions == {}
    faster = replan(plan, observed(plan, slow=0.96))
    assert faster.roles[SLOW].precisions == {}
    assert faster.predicted.damage == 0
    # Now the other one is the slow one.
    other = replan(faster, observed(faster, fast=1.5))
    assert other.roles[FAST].precisions
    assert other.roles[SLOW].precisions == {}


def test_a_new_plan_is_worth_it() -> None:
    plan = planned(uneven(2.0), 24)
    for factor in (0.5, 0.9, 0.97, 1.03, 1.1, 1.6, 3.0):
        new = replan(plan, observed(plan, slow=factor))
        if new is plan:
            continue
        before = max(role.compute_s * (factor if name == SLOW else 1.0) for name, role in plan.roles.items())
        after = max(role.compute_s for role in new.roles.values())
        assert after < before / 1.01 or new.predicted.damage <= SPARED * plan.predicted.damage
    assert replan(plan, observed(plan, slow=1.005)) is plan
    assert MIN_SPEEDUP > 1


@settings(max_examples=15, deadline=None)
@given(st.dictionaries(st.sampled_from(["one", "two", "three"]), st.floats(0.3, 3.0)))
def test_whatever_is_observed_the_batch_and_the_budget_hold(factors: dict[str, float]) -> None:
    plan = _of_three()
    times = {name: role.compute_s * factors.get(role.device, 1.0) for name, role in plan.roles.items()}
    new = replan(plan, times)
    assert sum(new.shares) == 23
    assert min(new.shares) >= 1
    assert new.predicted.damage <= plan.budget
    assert [new.roles[new.role_of(r)].device for r in range(6)] == [
        plan.roles[plan.role_of(r)].device for r in range(6)
    ]
    assert replan(plan, dict(reversed(times.items()))).hash == new.hash


def _of_three(made: list[Plan] = []) -> Plan:  # noqa: B006  # made once
    if not made:
        made.append(planned(three(one=2, two=3, three=1), 23, budget=1e-3))
    return made[0]


def test_memory_bounds_what_a_rank_is_given() -> None:
    plan = planned(uneven(1.0, slow=BETWEEN), 28, budget=0.0)
    new = replan(plan, observed(plan, fast=3.0))
    role = new.roles[SLOW]
    assert role.memory_bytes is not None
    assert role.peak_bytes <= role.memory_bytes
    free = replace(plan, roles={n: replace(r, memory_bytes=None) for n, r in plan.roles.items()})
    assert replan(free, observed(free, fast=3.0)).shares[1] > new.shares[1]


def test_what_was_not_observed_is_refused() -> None:
    plan = planned(uneven(1.3), batch="fixed")
    with pytest.raises(TrimtabError, match="no role 'gpu'; it has fast, slow"):
        replan(plan, {"gpu": 1.0})
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(TrimtabError, match="is not a valid compute time of slow"):
            replan(plan, {SLOW: bad})


def test_a_plan_for_fewer_ranks_is_the_one_that_would_have_been_made_for_them() -> None:
    plan = planned(three(), 22, budget=0.0)
    assert devices_of(plan) == ["one", "two", "three"]
    assert plan.shares == (12, 6, 4)
    assert plan_for_ranks(plan, devices_of(plan)) is plan
    fewer = plan_for_ranks(plan, ["one", "three"])
    assert devices_of(fewer) == ["one", "three"]
    assert fewer.batch_size == plan.batch_size
    assert fewer.shares == (17, 5)
    assert (fewer.model, fewer.bits, fewer.budget, fewer.batch) == (
        plan.model,
        plan.bits,
        plan.budget,
        plan.batch,
    )
    assert fewer.predicted.step_s > plan.predicted.step_s
    assert fewer.reasons[-1] == "made anew for 2 ranks from the plan for 3"
    alone = plan_for_ranks(plan, ["two"])
    assert alone.shares == (22,)
    assert plan_for_ranks(plan, ["three", "one"]).shares == fewer.shares[::-1], "other ranks, same order"


def test_a_plan_for_more_ranks_and_unknown_ones() -> None:
    plan = planned(three(), 22, budget=0.0)
    assert devices_of(plan_for_ranks(plan, ["one", None, None])) == ["one", "two", "three"]
    assert devices_of(plan_for_ranks(plan, [None, "one", "two", None, "three"])) == [
        *("three", "one", "two", "three", "three"),
    ], "what the plan lacks is taken to be slow"
    more = plan_for_ranks(plan, ["one", "one", "two", "three"])
    assert more.shares[0] == more.shares[1] > more.shares[2] > more.shares[3]
    assert sum(more.shares) == 22
    again = plan_for_ranks(more, devices_of(plan))
    assert again.shares == plan.shares
    assert sum("made anew" in reason for reason in again.reasons) == 1


def test_lowered_precisions_are_chosen_anew_for_the_ranks_that_are_there() -> None:
    plan = planned(uneven(1.3), 12, batch="fixed")
    assert plan.roles[SLOW].precisions
    alone = plan_for_ranks(plan, [SLOW])
    assert not alone.roles[alone.role_of(0)].precisions, "there is nobody to keep up with"
    assert alone.shares == (12,)
    free = planned(uneven(1.3), 12, batch="free")
    assert plan_for_ranks(free, [SLOW]).predicted.damage <= free.budget


def test_ranks_that_a_plan_says_nothing_about_are_refused() -> None:
    plan = planned(three(), 4, budget=0.0)
    with pytest.raises(TrimtabError, match="knows nothing of four"):
        plan_for_ranks(plan, ["one", "four"])
    with pytest.raises(TrimtabError, match="4 samples cannot be divided among 5 ranks"):
        plan_for_ranks(plan, ["one"] * 5)
