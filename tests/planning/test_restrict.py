"""A plan without the adjustments that the user does not allow."""

from __future__ import annotations

import pytest
from tests.control.plans.plan_cases import net, plan_for

from trimtab.errors import TrimtabError
from trimtab.planning.replan import replan
from trimtab.planning.restrict import restricted
from trimtab.selector import selected


def test_everything_allowed_is_the_same_plan() -> None:
    plan = plan_for(net(), bits=4)
    assert restricted(plan, selected("auto")) is plan


def test_exact_keeps_shares_alone() -> None:
    plan = plan_for(net(), bits=4, layer_bits={"up.weight": 8})
    exact = restricted(plan, selected("exact"))
    assert exact.shares == plan.shares == (5, 3)
    assert (exact.bits, exact.layer_bits) == (None, {})
    assert all(not role.precisions for role in exact.roles.values())
    assert exact.roles["slow"].compute_s == pytest.approx(7e-3 + 1e-3 + 0.5e-3), "it computes for longer now"
    assert "bits and precision of the plan are left out" in exact.reasons[-1]


def test_without_bits_weights_of_fsdp_are_gathered_exactly() -> None:
    exact = restricted(plan_for(net(), wrapper="fsdp", bits=4, weight_bits=8), selected("shares"))
    assert (exact.bits, exact.weight_bits) == (None, None)


def test_later_plans_keep_to_it() -> None:
    exact = restricted(plan_for(net()), selected("exact"))
    later = replan(exact, {"fast": 7e-3, "slow": 50e-3})
    assert not any(role.precisions for role in later.roles.values())


def test_without_shares_every_rank_has_the_same() -> None:
    even = restricted(plan_for(net()), selected("bits,precision"))
    assert even.shares == (4, 4)
    assert even.batch == "fixed"
    assert even.roles["slow"].precisions == {"up": "fp16", "down": "bf16"}


def test_a_batch_that_does_not_divide_is_refused() -> None:
    plan = plan_for(net(), ranks=(("fast", 1), ("slow", 2)))
    with pytest.raises(TrimtabError, match="11 samples must divide evenly among 3 ranks"):
        restricted(plan, selected("bits"))
