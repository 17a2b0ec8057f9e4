"""What adjustments are worth: known answers on hand-made clusters, and rules that every plan keeps."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.planning import BETWEEN, FAST, SLOW, planned, three, uneven

from trimtab.cli.plan import adjustments, drawn, tradeoff
from trimtab.cluster import Cluster, Host, Link
from trimtab.planning.adjustments import SKIPPED, label
from trimtab.planning.reasons import Adjustment, compared, shown

if TYPE_CHECKING:
    from trimtab.planning.plan import Plan

ROUNDING = 1e-9


def linked(slower: float, gbit: float, hosts: tuple[int, int] = (1, 1)) -> Cluster:
    return replace(
        uneven(slower),
        links={"far": Link(gbit_per_s=gbit)},
        hosts=(
            Host(name="a", devices={FAST: 1}, link="far", count=hosts[0]),
            Host(name="b", devices={SLOW: 1}, link="far", count=hosts[1]),
        ),
    )


def said(plan: Plan, *words: str) -> str:
    """The one reason that has all of these words."""
    matches = [reason for reason in plan.reasons if all(word in reason for word in words)]
    assert len(matches) == 1, (words, plan.reasons)
    return matches[0]


# Known answers


def test_shares_are_worth_what_the_slow_rank_would_take_longer() -> None:
    plan = planned(uneven(2.0), 12, budget=0.0, bits=None)
    predicted = plan.predicted
    assert plan.shares == (8, 4)
    # 37 operators of 3 ms a sample, twice as long on the slow rank: 6 samples of it instead of 4.
    assert predicted.without["shares"] == predicted.plain_step_s
    assert predicted.alone["shares"] == predicted.step_s
    assert predicted.plain_step_s / predicted.step_s == pytest.approx(1.5, abs=0.01)
    words = "8 for each of 1 fast, 4 for each of 1 slow; without it the step is 50 % longer"
    assert said(plan, "shares follow speed").endswith(words)
    assert predicted.tradeoff[0] == (predicted.step_s, 0.0)


def test_precision_and_the_card_of_a_rank_are_told_together() -> None:
    plan = planned(uneven(1.04), batch="fixed")
    without = plan.predicted.without
    reason = said(plan, "rank 1 (slow): 10 of 13 operators in int8")
    assert f"without it the step {compared(without['precision'], plan.predicted.step_s)}" in reason
    assert f"without the card it {compared(without['rank 1 (slow)'], plan.predicted.step_s)}" in reason
    assert without["precision of slow"] == without["precision"] == plan.predicted.plain_step_s
    # The fast rank alone computes twice as much, and sends nothing.
    assert without["rank 1 (slow)"] == pytest.approx(2 * plan.predicted.step_s, rel=0.03)
    assert "without rank 0 (fast) the step is" in " ".join(plan.reasons)


def test_bits_are_worth_what_the_link_would_take_longer() -> None:
    plan = planned(linked(1.0, 0.001), 8, budget=0.0)
    assert plan.bits == "adaptive"
    assert plan.predicted.alone["bits"] == pytest.approx(plan.predicted.step_s, rel=1e-3)
    assert plan.predicted.without["bits"] > 4 * plan.predicted.step_s
    words = f"without it the step {compared(plan.predicted.without['bits'], plan.predicted.step_s)}"
    assert said(plan, "bits adapt to the gradients during training; predicted with 3").endswith(words)
    uniform = planned(linked(1.0, 0.001), 8, budget=0.0, bits=4)
    assert said(uniform, "gradients are sent in 4 bits")
    assert plan.predicted.step_s < uniform.predicted.step_s


def test_bits_that_were_asked_for_hide_nothing_of_the_others() -> None:
    free, chosen = planned(uneven(2.0), 12), planned(uneven(2.0), 12, bits=4)
    assert chosen.bits == 4
    for name in ("shares", "precision"):
        assert chosen.predicted.alone[name] == pytest.approx(free.predicted.alone[name], rel=1e-3)
    adaptive = planned(uneven(2.0), 12, bits="adaptive")
    assert said(adaptive, "bits adapt to the gradients", "without it the step")
    assert not any("gradients are sent" in reason for reason in adaptive.reasons)
    fixed = planned(uneven(1.04), batch="fixed", bits=4)
    assert fixed.predicted.alone["precision"] < fixed.predicted.plain_step_s


def test_a_card_that_hurts_is_named() -> None:
    plan = planned(uneven(20.0), 4, budget=0.0)
    predicted = plan.predicted
    assert plan.shares == (3, 1)
    assert predicted.without["rank 1 (slow)"] < predicted.step_s / 4
    reason = said(plan, "without rank 1 (slow) the step would take")
    assert shown(predicted.without["rank 1 (slow)"]) in reason
    assert reason.endswith("the job is faster without")


def test_what_only_fits_lowered_cannot_do_without() -> None:
    plan = planned(uneven(1.0, slow=BETWEEN), 32, batch="fixed")
    assert "precision" not in plan.predicted.without
    assert "precision of slow" not in plan.predicted.without
    assert "shares" not in plan.predicted.alone


def test_many_classes_skip_what_would_take_long_and_say_so() -> None:
    one = three().profile
    assert one is not None
    names = [f"c{i}" for i in range(5)]
    many = replace(
        three(),
        devices=dict.fromkeys(names, three().devices["one"]),
        hosts=tuple(Host(name=name, devices={name: 1}, link="lan") for name in names),
        profile=replace(one, devices=dict.fromkeys(names, one.devices["one"])),
    )
    plan = planned(many, 10)
    assert plan.predicted.tradeoff == ()
    assert not any("rank" in name for name in plan.predicted.without)
    assert SKIPPED in plan.reasons[:-1]
    assert {"shares", "precision", "bits"} <= plan.predicted.alone.keys()
    assert drawn(plan) == []


def test_ranks_of_which_nothing_would_be_known_are_left_out() -> None:
    cluster = uneven(2.0)
    assert cluster.profile is not None
    without_local = replace(cluster.profile, links={"lan": cluster.profile.links["lan"]})
    hosts = (cluster.hosts[0], replace(cluster.hosts[1], devices={SLOW: 2}))
    plan = planned(replace(cluster, hosts=hosts, profile=without_local), 12)
    # The link between the two ranks of the slow host was not measured.
    assert [name for name in plan.predicted.without if name.startswith("rank")] == ["ranks 1-2 (slow)"]


def test_groups_of_ranks_are_told_by_number() -> None:
    assert label([3], "T4") == "rank 3 (T4)"
    assert label([0, 1, 2], "A10") == "ranks 0-2 (A10)"
    assert label([0, 2], "A10") == "2 ranks (A10)"


def test_adjustments_of_others_are_told_alike() -> None:
    made = Adjustment(name="wrapper", words="the model is sharded", without_s=0.5)
    assert made.reason(0.4) == "the model is sharded; without it the step is 25 % longer"
    assert made.reason(1.0) == "the model is sharded; without it the step is 50 % shorter"
    assert replace(made, without_s=None).reason(1.0) == "the model is sharded"
    assert replace(made, words="").reason(1.0) == ""


# Rules

PLANS: dict[str, Any] = {
    "slower": st.sampled_from([1.0, 1.2, 2.0, 5.0]),
    "hosts": st.tuples(st.integers(1, 3), st.integers(1, 3)),
    "gbit": st.sampled_from([0.01, 0.3, 10.0]),
    "size": st.sampled_from([1e-6, 1e-3, 1e-1]),
    "batch": st.sampled_from(["free", "fixed"]),
}


@settings(max_examples=12, deadline=None)
@given(**PLANS)
def test_every_plan_keeps_its_word(
    slower: float, hosts: tuple[int, int], gbit: float, size: float, batch: Literal["free", "fixed"]
) -> None:
    plan = planned(linked(slower, gbit, hosts), 4 * sum(hosts), size=size, batch=batch)
    predicted = plan.predicted
    step_s = predicted.step_s
    assert {"precision", "bits"} <= predicted.alone.keys()
    for name, alone_s in predicted.alone.items():
        assert step_s <= alone_s * (1 + ROUNDING), f"{name} alone is faster than the plan"
        assert alone_s <= predicted.plain_step_s * (1 + ROUNDING), f"{name} alone is slower than plain DDP"
    for name, without_s in predicted.without.items():
        if "rank" not in name:
            assert without_s >= step_s * (1 - ROUNDING), f"the plan is faster without {name}"
    _words_equal_data(plan)
    _advice_agrees_with_the_table(plan)
    _curve_is_one(plan)


def _words_equal_data(plan: Plan) -> None:
    predicted = plan.predicted
    for name, without_s in predicted.without.items():
        told = compared(without_s, predicted.step_s)
        if "rank" in name and without_s < predicted.step_s:
            assert shown(without_s) in said(plan, f"without {name} the step would take")
        elif "rank" in name:
            saying = [
                reason
                for reason in plan.reasons
                if reason == f"without {name} the step {told}"
                or (reason.startswith(f"{name}: ") and reason.endswith(f"it {told}"))
            ]
            assert len(saying) == 1, "said once"
    for reason in plan.reasons:
        if reason.startswith("shares follow"):
            assert reason.endswith(
                f"without it the step {compared(predicted.without['shares'], predicted.step_s)}"
            )
    for text in re.findall(
        r"(\w+) ([\d.]+ m?s)", " ".join(r for r in plan.reasons if r.startswith("each alone"))
    ):
        assert shown(predicted.alone[text[0]]) == text[1]


def _advice_agrees_with_the_table(plan: Plan) -> None:
    """What the words promise is what the numbers above them say."""
    words = " | ".join(plan.reasons)
    gains = plan.predicted.plain_step_s >= 1.005 * plan.predicted.step_s
    assert ("times as fast" in words) == gains
    assert ("nothing makes a step faster" in words) == (not gains)
    assert "give them" not in words, "advice that nobody tried"
    assert ("gradients are sent in" in words) == isinstance(plan.bits, int)
    assert ("bits adapt to the gradients" in words) == (plan.bits == "adaptive")
    assert ("gradients are sent uncompressed" in words) == (plan.bits is None)
    lowered = any(role.precisions for role in plan.roles.values())
    assert ("nothing is lowered" in words) == (not lowered)
    assert ("the damage of lower precision" in words) == lowered
    for name, seconds in plan.predicted.alone.items():
        nothing = re.search(rf"alone, .*\b{name}\b.* would gain nothing", words) is not None
        assert nothing == (seconds >= plan.predicted.plain_step_s)


def _curve_is_one(plan: Plan) -> None:
    curve = plan.predicted.tradeoff
    assert len(curve) <= 16
    assert (plan.predicted.step_s, plan.predicted.damage) in curve
    for (step_s, damage), (faster_s, more) in itertools.pairwise(curve):
        assert faster_s < step_s
        assert more > damage
    assert sum(point["chosen"] for point in tradeoff(plan)) == 1
    if len(curve) > 1:
        lines = [line for line in drawn(plan) if "|" in line]
        assert len(lines) == len(curve)
        assert all(line.isascii() for line in lines)
        (own,) = (line for line in lines if line.endswith("*"))
        assert own.split()[1] == f"{plan.predicted.step_s * 1e3:.4g}"
        stems = [line.partition("|")[2].count("-") for line in lines]
        assert stems == sorted(stems, reverse=True)
        assert stems[-1] == 0
    assert {row["adjustment"] for row in adjustments(plan)} == {
        *plan.predicted.alone,
        *plan.predicted.without,
    }
