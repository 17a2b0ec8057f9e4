"""Plans from measurements: both modes, memory, bits, many ranks, and everything that can be wrong."""

from __future__ import annotations

from dataclasses import replace
from math import fsum
from typing import TYPE_CHECKING, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.planning import (
    BETWEEN,
    FAST,
    SLOW,
    behind_a_slow_link,
    damages,
    planned,
    three,
    uneven,
)
from tests.planning.precision.exhaustive import exhaustive
from tests.predict.profiles import profile, workload

from trimtab.cluster import Host, Link
from trimtab.errors import TrimtabError
from trimtab.planning.make_plan import make_plan
from trimtab.planning.plan import load_plan, save_plan
from trimtab.planning.plan_search import GAIN, PlanSearch
from trimtab.planning.precision.allocate import TOLERANCE, allocate
from trimtab.planning.precision.starting_point import Lowerable
from trimtab.planning.replan import plan_for_ranks, replan
from trimtab.planning.roles import layout
from trimtab.precision_names import OWN
from trimtab.predict.collectives import Route
from trimtab.predict.operators.costs import workload_key
from trimtab.predict.operators.measured import Measured
from trimtab.predict.operators.measured_precisions import MeasuredPrecisions
from trimtab.predict.replayed_job import ReplayedJob, RoleSetting
from trimtab.predict.step import JobSetting, RankSetting, predict_step

if TYPE_CHECKING:
    from trimtab.planning.plan import Plan


def replayed(plan: Plan, slower: float) -> float:
    """The plan's step, predicted from nothing."""
    job = JobSetting(
        ranks={n: RankSetting(samples=r.samples, precisions=r.precisions) for n, r in plan.roles.items()},
        bits=None if plan.bits == "adaptive" else plan.bits,
    )
    return predict_step(Measured(workload(), profile(slower)), uneven(slower), job).step_s


def test_with_fixed_shares_only_slow_ranks_are_lowered_and_no_further_than_it_takes() -> None:
    plan = planned(uneven(1.04), batch="fixed")
    assert plan.shares == (4, 4)
    assert plan.roles[FAST].precisions == {}
    low = plan.roles[SLOW].precisions
    assert 0 < len(low) < len(plan.roles[SLOW].choices)
    # It keeps the pace of the fast ranks, and less than all of it being low is enough for that.
    assert plan.roles[SLOW].compute_s <= plan.roles[FAST].compute_s * 1.01
    assert plan.predicted.damage < 0.7 * plan.predicted.uniform_damage
    assert plan.predicted.step_s < plan.predicted.plain_step_s / 1.03
    assert plan.predicted.step_s == pytest.approx(replayed(plan, 1.04), rel=1e-9)


def test_with_fixed_shares_a_gap_too_wide_lowers_everything_that_helps() -> None:
    plan = planned(uneven(4.0), batch="fixed")
    assert len(plan.roles[SLOW].precisions) == len(plan.roles[SLOW].choices)
    assert plan.predicted.damage == pytest.approx(plan.predicted.uniform_damage)


def test_even_ranks_are_left_alone() -> None:
    plan = planned(uneven(1.0), batch="fixed")
    assert not any(role.precisions for role in plan.roles.values())
    assert plan.predicted.step_s == plan.predicted.plain_step_s
    assert plan.predicted.damage == plan.predicted.uniform_damage == 0
    assert "nothing makes a step faster than plain DDP here" in plan.reasons


def test_free_shares_come_first_and_damage_stays_within_the_budget() -> None:
    steps = []
    for budget in (0.0, 1e-4, 1e-3, 1.0):
        plan = planned(uneven(2.0), 12, budget=budget)
        assert sum(plan.shares) == 12
        assert plan.predicted.damage <= budget
        assert plan.predicted.step_s == pytest.approx(replayed(plan, 2.0), rel=1e-9)
        steps.append(plan.predicted.step_s)
    assert planned(uneven(2.0), 12, budget=0.0).shares == (8, 4)
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1] * GAIN


def test_what_gains_next_to_nothing_is_not_lowered() -> None:
    # All but a thousandth of the time is spent where nothing can be lowered.
    given = uneven(1.0)
    assert given.profile is not None
    devices = {
        name: replace(
            device,
            operators={
                key: replace(time, forward_s=time.forward_s / 1e4, backward_s=time.backward_s / 1e4)
                if key.startswith("linear")
                else time
                for key, time in device.operators.items()
            },
        )
        for name, device in given.profile.devices.items()
    }
    plan = planned(replace(given, profile=replace(given.profile, devices=devices)), budget=1.0)
    assert not any(role.precisions for role in plan.roles.values())
    assert any("gain less than 2%" in reason for reason in plan.reasons)


def test_a_plan_is_no_worse_than_every_alternative() -> None:
    for slower in (1.3, 2.5):
        free, fixed = planned(uneven(slower), 12), planned(uneven(slower), 12, batch="fixed")
        shares = planned(uneven(slower), 12, budget=0.0)
        assert free.predicted.step_s <= min(fixed.predicted.step_s, shares.predicted.step_s) * 1.001
        assert shares.predicted.step_s <= shares.predicted.plain_step_s


@settings(max_examples=10, deadline=None)
@given(
    slower=st.sampled_from([1.0, 1.4, 3.0]),
    counts=st.tuples(st.integers(1, 3), st.integers(1, 200)),
    local=st.sampled_from([1, 4]),
    gbit=st.sampled_from([0.1, 10.0, 100.0]),
    batch=st.sampled_from(["free", "fixed"]),
)
def test_no_plan_is_predicted_slower_than_plain_ddp(
    slower: float, counts: tuple[int, int], local: int, gbit: float, batch: Literal["free", "fixed"]
) -> None:
    given_cluster = replace(
        uneven(slower),
        links={"far": Link(gbit_per_s=gbit)},
        hosts=(
            Host(name="a", devices={FAST: local}, link="far", count=counts[0]),
            Host(name="b", devices={SLOW: local}, link="far", count=counts[1]),
        ),
    )
    plan = planned(given_cluster, 2 * given_cluster.world_size, batch=batch)
    assert plan.predicted.step_s <= plan.predicted.plain_step_s
    gains = any("times as fast" in reason for reason in plan.reasons)
    assert gains or any("plain DDP's step takes" in reason for reason in plan.reasons)


def test_three_classes_and_ranks_that_do_not_divide() -> None:
    given = three(one=2, two=3, three=1)
    plan = planned(given, 23, budget=1e-2)
    assert plan.world_size == 6
    assert sum(plan.shares) == 23
    assert min(plan.shares) >= 1
    devices = [rank.device for rank in given.ranks()]
    assert [plan.roles[plan.role_of(rank)].device for rank in range(6)] == devices
    by_class = {d: [s for s, own in zip(plan.shares, devices, strict=True) if own == d] for d in set(devices)}
    assert all(max(own) - min(own) <= 1 for own in by_class.values())
    assert sum(by_class["one"]) / 2 > sum(by_class["two"]) / 3 > sum(by_class["three"])


def test_many_alike_ranks_cost_what_few_do() -> None:
    given = replace(
        uneven(2.0),
        hosts=(
            Host(name="a", devices={FAST: 8}, link="lan", count=64),
            Host(name="b", devices={SLOW: 8}, link="lan", count=64),
        ),
    )
    plan = planned(given, 4000, bits=None)
    assert plan.world_size == 1024
    assert sum(plan.shares) == 4000
    assert len(plan.roles) <= 4


# Memory


def test_memory_is_a_hard_constraint_in_both_modes() -> None:
    assert not planned(uneven(1.0), 32, batch="fixed").roles[SLOW].precisions
    tight = uneven(1.0, slow=BETWEEN)
    fixed = planned(tight, 32, batch="fixed")
    assert 0 < len(fixed.roles[SLOW].precisions) < len(fixed.roles[SLOW].choices)
    assert any("would not fit its memory" in reason for reason in fixed.reasons)
    both = uneven(1.0, slow=BETWEEN, fast=BETWEEN)
    free = planned(both, 32, size=1e-3)
    slower = planned(uneven(2.0, slow=BETWEEN), 48)
    for plan in (fixed, free, slower):
        for role in plan.roles.values():
            assert role.memory_bytes is None or role.peak_bytes <= role.memory_bytes
    assert free.predicted.damage > 0
    search = PlanSearch(both, workload(), damages(), 31)
    with pytest.raises(TrimtabError, match="fits only with operators lowered"):
        search.choose("free", (None,), 0.0, search.plain())
    assert planned(both, 31, budget=0.0, layout="data").wrapper == "fsdp"  # which damages nothing


def test_what_does_not_fit_is_refused_with_what_is_missing() -> None:
    with pytest.raises(TrimtabError, match=r"slow: a step needs .* MiB are missing"):
        planned(uneven(1.0, slow=BETWEEN / 4), 4, batch="fixed", layout="data")
    with pytest.raises(TrimtabError, match=r"slow: a single sample needs .* MiB are missing"):
        planned(uneven(1.0, slow=BETWEEN / 4), layout="data")
    with pytest.raises(TrimtabError, match=r"a batch of 127 does not fit: .* are too many.*micro-batches"):
        planned(uneven(1.0, slow=BETWEEN, fast=BETWEEN), 127, layout="data")


@pytest.mark.parametrize(("batch", "total"), [("fixed", 64), ("free", 64), ("free", 32)])
def test_a_batch_that_memory_does_not_hold_is_divided_into_micro_batches(batch: str, total: int) -> None:
    plan = planned(uneven(1.0, slow=BETWEEN, fast=BETWEEN), total, batch=batch, budget=0.0)
    assert plan.accumulate > 1
    assert sum(plan.shares) == total
    assert plan.predicted.damage == 0 or batch == "fixed"
    for role in plan.roles.values():
        assert role.samples % plan.accumulate == 0
        assert role.memory_bytes is None or role.peak_bytes <= role.memory_bytes
    # Three times the work of a third of the batch, with the exchange and the optimizer once.
    part = planned(uneven(1.0), total // plan.accumulate, batch=batch, budget=0.0)
    assert part.predicted.step_s < plan.predicted.step_s < plan.accumulate * part.predicted.step_s


def test_samples_go_where_there_is_memory() -> None:
    plan = planned(uneven(1.0, slow=BETWEEN), 32, budget=0.0)
    assert plan.shares[0] > plan.shares[1]
    assert plan.predicted.damage == 0


def test_a_batch_that_did_not_fit_when_probed_is_not_planned() -> None:
    even = uneven(1.0)
    assert planned(even, 32, budget=0.0).shares == (16, 16)
    assert even.profile is not None
    slow = replace(even.profile.devices[SLOW], too_large={workload_key(workload()): 12})
    known = replace(even, profile=replace(even.profile, devices={**even.profile.devices, SLOW: slow}))
    plan = planned(known, 32, budget=0.0)
    assert max(plan.shares[1:]) < 12
    assert sum(plan.shares) == 32


# Bits


def test_bits_are_chosen_where_they_gain() -> None:
    given = uneven(1.0)
    assert given.profile is not None
    slow_link = {
        "lan": {
            name: replace(time, per_byte_s=time.per_byte_s * 3000)
            for name, time in given.profile.links["lan"].items()
        }
    }
    narrow = replace(given, profile=replace(given.profile, links=slow_link))
    assert planned(narrow).bits == "adaptive"
    assert planned(narrow).layer_bits == {}, "they are chosen from the gradients"
    assert planned(given).bits is None
    assert planned(narrow, bits=None).bits is None
    assert planned(given, bits=4).bits == 4
    assert planned(given, bits="adaptive").bits == "adaptive"
    with pytest.raises(TrimtabError, match="codec was not measured at 3 bits"):
        planned(given, bits=3)


def test_a_rank_behind_a_slow_link_owns_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.planning.plan_search.BUCKET_CAPS_MB", (0.15,))  # a small model
    cluster = behind_a_slow_link(1000.0)
    plan = planned(cluster, 12, budget=0.0, bits=4, layout="data")
    assert plan.route == Route(spared=(2,))
    assert plan.predicted.without["route"] > GAIN * plan.predicted.step_s
    assert any("rank 2 owns no chunk" in reason for reason in plan.reasons)
    # With one bucket its link would carry it there and back one after the other, which is no gain.
    monkeypatch.setattr("trimtab.planning.plan_search.BUCKET_CAPS_MB", (100.0,))
    assert planned(cluster, 12, budget=0.0, bits=4, layout="data").route is None
    # For other ranks it is not known who is behind the slow link.
    assert plan_for_ranks(plan, ["one", "two"]).route == Route()
    assert replan(plan, {"three": 3 * plan.roles["three"].compute_s}).route == plan.route


def test_buckets_that_exist_already_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.planning.plan_search.BUCKET_CAPS_MB", (0.1,))  # a small model
    cluster = behind_a_slow_link(50.0)
    assert planned(cluster, 12, bits=None).bucket_cap_mb == 0.1
    plan = planned(cluster, 12, bits=None, own_buckets=True)
    assert plan.bucket_cap_mb is None
    assert not any("bucket" in reason for reason in plan.reasons)


# Bad input


def test_a_batch_smaller_than_ranks_is_refused() -> None:
    with pytest.raises(TrimtabError, match="a batch of 1 is smaller than the 2 ranks"):
        planned(uneven(), 1)
    with pytest.raises(TrimtabError, match=r"a batch of 7 cannot be shared equally among 2 .* 6 or 8"):
        planned(uneven(), 7, batch="fixed")


def test_an_operator_that_does_not_exist_is_named() -> None:
    with pytest.raises(TrimtabError, match=r"'blocks\.99' is not an operator of"):
        make_plan(uneven(), workload(), {"blocks.99": {"int8": 1.0}}, model="m", trimtab="0", batch_size=8)


def test_without_probed_precisions_or_damages_shares_are_all_there_is() -> None:
    cluster = uneven(2.0)
    assert cluster.profile is not None
    plain_only = {
        name: replace(
            device,
            operators={key: time for key, time in device.operators.items() if not key.endswith("|int8")},
        )
        for name, device in cluster.profile.devices.items()
    }
    unprobed = replace(cluster, profile=replace(cluster.profile, devices=plain_only))
    for chosen, words in ((cluster, "trimtab probe --damage"), (unprobed, "no lower precision was probed")):
        plan = make_plan(chosen, workload(), {}, model="m", trimtab="0", batch_size=12)
        assert plan.shares == (8, 4)
        assert any(words in reason for reason in plan.reasons)


# As data


def test_the_same_input_gives_the_same_plan(tmp_path: object) -> None:
    one, two = planned(uneven(2.0), 12), planned(uneven(2.0), 12)
    assert one == two
    assert one.hash == two.hash
    backwards = dict(reversed(damages().items()))
    other = make_plan(uneven(2.0), workload(), backwards, model="m", trimtab="0", batch_size=12)
    assert other.hash == one.hash


def test_choices_hold_what_a_later_plan_needs(tmp_path: object) -> None:
    from pathlib import Path

    plan = planned(uneven(1.1), batch="fixed")
    role = plan.roles[SLOW]
    for operator, by in role.choices.items():
        assert OWN in by
        assert by[OWN].damage == 0
        assert by[role.precisions.get(operator, OWN)].memory == 0
        assert by["int8"].damage == pytest.approx(damages()[operator]["int8"] / 4)
    chosen = fsum(by[role.precisions.get(o, OWN)].damage for o, by in role.choices.items())
    assert chosen == pytest.approx(plan.predicted.damage)
    assert 0 <= role.after_s <= role.fixed_s <= role.compute_s
    path = Path(str(tmp_path)) / "plan.json"
    save_plan(plan, path)
    assert load_plan(path) == plan


def test_role_names_stay_unique() -> None:
    found = layout(["a", "a", "a_x2"], {"a": (3, 2), "a_x2": (2,)})
    assert found.ranks == (("a_x3", 1), ("a_x2_", 1), ("a_x2", 1))
    assert found.devices == {"a_x3": "a", "a_x2_": "a", "a_x2": "a_x2"}


def test_through_the_replayer_the_allocator_is_as_good_as_trying_everything() -> None:
    offers = MeasuredPrecisions(Measured(workload(), profile(1.3)))
    names = [name for name, several in offers.precisions(SLOW, 4).items() if several][:7]
    of = {name: damages()[name] for name in names}
    roles = {
        FAST: RoleSetting(device=FAST, samples=4, precisions={}),
        SLOW: RoleSetting(device=SLOW, samples=4, precisions={}),
    }

    def pace() -> ReplayedJob:
        return ReplayedJob(offers, uneven(1.3), roles, ((FAST, 1), (SLOW, 1)))

    slow = {SLOW: Lowerable(damages=of)}
    # A pace between all low and nothing low, so that there is something to choose.
    low = allocate(pace(), slow).step_s
    wanted = (low + pace().step_s()) / 2
    found = allocate(pace(), slow, others_s=wanted)
    best = exhaustive(pace(), slow, limit_s=wanted * (1 + TOLERANCE))
    assert best is not None
    least = fsum(of[name].get(precision, 0.0) for name, precision in best[SLOW].items())
    assert 0 < least <= found.damage <= 1.02 * least


def test_progress_is_told() -> None:
    seen: list[tuple[int, int]] = []
    planned(uneven(2.0), progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 2
    assert all(done <= total for done, total in seen)
    assert isinstance(PlanSearch(uneven(), workload(), {}, 8).plain().step_s, float)
