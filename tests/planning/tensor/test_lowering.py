"""Precisions inside tensor groups: against every choice where there are few, within the budget, never slower."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from tests.planning.planning import damages
from tests.planning.tensor.test_layout import ranks_on_hosts
from tests.predict.profiles import FAST, SLOW, device_profile, workload

from trimtab.cluster import Cluster, Device, Host
from trimtab.planning.make_plan import make_plan
from trimtab.planning.plan import Plan
from trimtab.planning.tensor.layout import Layout, LayoutSearch
from trimtab.planning.tensor.lowering import Lowering
from trimtab.predict.operators.measured import Measured
from trimtab.predict.operators.measured_precisions import MeasuredPrecisions
from trimtab.predict.tensor import TensorJob

TOTAL = 4


def lowering_on(on: Cluster, budget: float, size: float = 1e-3) -> Lowering:
    assert on.profile is not None
    measured = Measured(workload(), on.profile)
    layouts = LayoutSearch(job=TensorJob(measured, on), total=TOTAL, limits={FAST: None, SLOW: None})
    return Lowering(
        layouts=layouts, measured=MeasuredPrecisions(measured), damages=damages(size), budget=budget
    )


def even(search: Lowering, groups: tuple[tuple[int, ...], ...] = ((0, 1),)) -> Layout:
    size = len(groups[0])
    samples = (TOTAL // len(groups),) * len(groups)
    return search.layouts.at(groups, (1 / size,) * size, samples, None)


def oracle(search: Lowering, layout: Layout) -> float:
    """The shortest step over every choice of projections on every rank of one group, with these shares."""
    names = list(search.blocks)
    best = float("inf")
    for mask in product((False, True), repeat=2 * len(names)):
        low = tuple(
            {name: "int8" for name, on in zip(names, mask[rank::2], strict=True) if on} for rank in range(2)
        )
        setting = layout.setting
        one = search.layouts.at(setting.groups, layout.shares, setting.samples, None, (low,))
        if search.damage(one.setting) <= search.budget:
            best = min(best, one.step.step_s)
    return best


@pytest.mark.parametrize("budget", [2e-5, 1e-4, 5e-4, 1.0])
def test_it_finds_what_every_choice_offers(budget: float) -> None:
    """Up to what overlaps: the frontiers add up the two passes of a block."""
    search = lowering_on(ranks_on_hosts(FAST, SLOW), budget)
    search.blocks = dict(list(search.blocks.items())[:5])
    layout = even(search)
    found = search._lowest(layout)
    assert search.damage(found.setting) <= budget
    assert found.step.step_s <= oracle(search, layout) * 1.01
    assert search.best(layout).step.step_s <= found.step.step_s


def test_no_budget_lowers_nothing_and_more_budget_is_never_slower() -> None:
    steps = []
    for budget in (0.0, 1e-5, 1e-4, 1e-3, 1e-2):
        search = lowering_on(ranks_on_hosts(FAST, SLOW, FAST, SLOW), budget)
        layout = search.layouts.best(2)
        assert layout is not None
        best = search.best(layout)
        assert best.damage == pytest.approx(search.damage(best.setting))
        assert best.damage <= budget
        assert best.step.step_s <= layout.step.step_s
        steps.append(best.step.step_s)
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0]


def test_a_precision_whose_damage_is_unknown_is_not_chosen() -> None:
    search = lowering_on(ranks_on_hosts(FAST, SLOW), 1.0)
    some = next(iter(search.blocks))
    search.damages = {some: {"int8": 1e-6}}
    low = search.best(even(search)).setting.precisions
    assert {name for group in low for own in group for name in own} <= {some}


def planned(on: Cluster, budget: float) -> Plan:
    return make_plan(
        on,
        workload(),
        damages(1e-3),
        model="m",
        trimtab="t",
        batch_size=TOTAL,
        budget=budget,
        layout=2,
        bits=None,
    )


def test_plans_hold_the_precisions_of_every_rank_and_say_what_they_are_worth() -> None:
    on = ranks_on_hosts(FAST, FAST)
    exact, low = planned(on, 0.0), planned(on, 1.0)
    assert not any(role.precisions for role in exact.roles.values())
    assert exact.predicted.damage == 0
    chosen = [role.precisions for role in low.roles.values()]
    assert any(chosen)
    search = lowering_on(on, 1.0)
    assert {
        name for own in chosen for name in own
    } <= search.blocks.keys()  # replicated ones are never lowered
    assert 0 < low.predicted.damage <= 1.0
    assert low.predicted.step_s * 1.02 <= exact.predicted.step_s
    assert low.predicted.without["precision"] > low.predicted.step_s
    assert any("projections in int8" in reason for reason in low.reasons)
    assert "nothing is lowered" in exact.reasons
    assert low.hash != replace(low, roles=exact.roles, ranks=exact.ranks).hash


def test_a_rank_without_units_of_a_lowered_block_has_a_peak() -> None:
    search = lowering_on(ranks_on_hosts(FAST, SLOW), 1.0)
    layout = even(search)
    none = dict.fromkeys(layout.setting.counts[0], 0)
    low = dict.fromkeys(search.blocks, "int8")
    assert (
        0
        < search.layouts.peak(FAST, none, TOTAL, 1, None, low)
        < search.layouts.peak(FAST, layout.setting.counts[0], TOTAL, 1, None, low)
    )


def test_with_equal_shares_slow_groups_are_lowered_to_the_pace_of_the_fast_one_and_no_further() -> None:
    search = replace(lowering_on(ranks_on_hosts(FAST, FAST, SLOW, SLOW), 0.0), level=True)
    groups = ((0, 1), (2, 3))
    layout = even(search, groups)
    level = search.best(layout)
    fast, slow = level.setting.precisions
    assert not any(fast)
    assert any(slow)
    assert level.step.step_s < layout.step.step_s
    assert level.setting.samples == layout.setting.samples
    assert level.damage == pytest.approx(search.damage(level.setting))
    assert level.damage > 0

    alike = replace(lowering_on(ranks_on_hosts(FAST, FAST, FAST, FAST), 0.0), level=True)
    assert not any(own for group in alike.best(even(alike, groups)).setting.precisions for own in group)


def test_plans_with_equal_shares_lower_slow_groups() -> None:
    """Two hosts of two ranks: a group inside each, because messages between hosts take long."""
    on = ranks_on_hosts(FAST)
    assert on.profile is not None
    far = {name: replace(time, per_message_s=5e-2) for name, time in on.profile.links["lan"].items()}
    on = replace(
        on,
        hosts=tuple(Host(name=f"h{name}", devices={name: 2}, link="lan") for name in (FAST, SLOW)),
        profile=replace(on.profile, links={**on.profile.links, "lan": far}),
    )
    plan = make_plan(
        on,
        workload(),
        damages(1e-3),
        model="m",
        trimtab="t",
        batch_size=TOTAL,
        batch="fixed",
        layout=2,
        bits=None,
    )
    assert plan.tensor_groups == ((0, 1), (2, 3))
    low = {role.device: bool(role.precisions) for role in plan.roles.values()}
    assert low == {FAST: False, SLOW: True}
    assert len(set(plan.shares)) == 1
    assert plan.predicted.without["precision"] > plan.predicted.step_s


def test_the_curve_runs_from_no_damage_to_the_fastest_step_through_the_plan() -> None:
    plan = planned(ranks_on_hosts(FAST, FAST), 1e-4)
    curve = plan.predicted.tradeoff
    steps, lost = zip(*curve, strict=True)
    assert len(curve) > 3
    assert lost[0] == 0
    assert list(steps) == sorted(steps, reverse=True)
    assert list(lost) == sorted(lost)
    assert (plan.predicted.step_s, plan.predicted.damage) in curve
    assert lost[-1] > 1e-4  # what a larger budget would bring


def test_groups_of_many_kinds_are_lowered() -> None:
    """Five speeds, a group of each: more kinds than shares are searched for again with."""
    speeds = {f"d{i}": 1 + 0.3 * i for i in range(5)}
    base = ranks_on_hosts(FAST)
    assert base.profile is not None
    on = replace(
        base,
        devices={name: Device(kind="cpu", speed=1 / slower) for name, slower in speeds.items()},
        hosts=tuple(Host(name=f"h{name}", devices={name: 2}, link="lan") for name in speeds),
        profile=replace(
            base.profile, devices={name: device_profile(slower) for name, slower in speeds.items()}
        ),
    )
    assert on.profile is not None
    measured = Measured(workload(), on.profile)
    search = Lowering(
        layouts=LayoutSearch(job=TensorJob(measured, on), total=10, limits=dict.fromkeys(speeds)),
        measured=MeasuredPrecisions(measured),
        damages=damages(1e-3),
        budget=1e-3,
    )
    groups = tuple((2 * i, 2 * i + 1) for i in range(5))
    layout = search.layouts.at(groups, (0.5, 0.5), (2,) * 5, None)
    assert not search.few_kinds(layout)
    best = search.best(layout)
    assert best.step.step_s < layout.step.step_s
    assert 0 < best.damage <= 1e-3
