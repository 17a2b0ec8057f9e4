"""DDP where it fits, else FSDP2 or HSDP, else the reason why nothing does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError
from tests.planning.planning import FAST, SLOW, damages, planned, uneven
from tests.predict.profiles import workload

from trimtab.cli.plan import summary
from trimtab.cluster import Cluster, Host
from trimtab.cluster.profile import Line
from trimtab.errors import TrimtabError
from trimtab.planning.plan import load_plan, save_plan
from trimtab.planning.plan_search import GAIN, PlanSearch
from trimtab.planning.replan import devices_of, plan_for_ranks
from trimtab.planning.roles import setting_of
from trimtab.planning.what_if import planned as job_of
from trimtab.planning.what_if import simulate
from trimtab.predict.fsdp_units import Sharding
from trimtab.wire_format import WEIGHT_BITS

if TYPE_CHECKING:
    from trimtab.planning.plan import Plan
    from trimtab.predict.step import JobSetting
    from trimtab.workload import Workload

GIB = 2**30
SMALL = 3_200_000 / GIB
"""GiB: less than weights, gradients, Adam's states and DDP's buckets need, more than a quarter of them."""


def four(memory: float, *, two_hosts: bool = False) -> Cluster:
    """Two fast ranks without a limit and two slow ones with so many GiB; on hosts of one or two ranks."""
    hosts = [(FAST, 2), (SLOW, 2)] if two_hosts else [(FAST, 1), (FAST, 1), (SLOW, 1), (SLOW, 1)]
    return replace(
        uneven(2.0, **{SLOW: memory}),
        hosts=tuple(Host(name=f"h{i}", devices={d: n}, link="lan") for i, (d, n) in enumerate(hosts)),
    )


def test_what_fits_stays_under_ddp() -> None:
    plan = planned(four(1.0), 8)
    assert plan.wrapper == "ddp"
    assert not any("FSDP2" in reason for reason in plan.reasons)


def with_optimizer(per_element_s: float) -> Cluster:
    """Four ranks whose optimizer takes this long."""
    cluster = four(1.0)
    assert cluster.profile is not None
    devices = {
        name: replace(device, optimiser=Line(a=per_element_s, c=0.0))
        for name, device in cluster.profile.devices.items()
    }
    return replace(cluster, profile=replace(cluster.profile, devices=devices))


def test_fsdp_is_advised_where_it_fits_and_is_much_faster() -> None:
    plan = planned(with_optimizer(1e-5), 8, layout="data")
    (advice,) = [reason for reason in plan.reasons[:-1] if "FSDP2 over 4 ranks" in reason]
    assert plan.wrapper == "ddp", "the script wraps the model, not the plan"
    said = float(advice.split("predicted to take ")[1].split(" ms")[0]) / 1e3
    assert 1.25 * said < plan.predicted.step_s
    known = with_optimizer(1e-5)
    assert known.profile is not None
    sums = {"all_reduce": known.profile.links["lan"]["all_reduce"]}
    unknown = replace(known, profile=replace(known.profile, links={"lan": sums}))
    assert planned(unknown, 8, layout="data", bits=None).bits is None, "no reason to fail"
    unwise = planned(with_optimizer(1e-12), 8, layout="data")
    assert not any("FSDP2" in reason for reason in unwise.reasons)


@pytest.mark.parametrize("batch", ["fixed", "free"])
def test_what_does_not_fit_is_sharded(batch: str, tmp_path: object) -> None:
    plan = planned(four(SMALL), 8, batch=batch, budget=0.0, size=1e-3 if batch == "free" else float("inf"))
    assert (plan.wrapper, plan.shard_ranks, plan.accumulate, plan.batch_size) == ("fsdp", None, 1, 8)
    for role in plan.roles.values():
        assert role.memory_bytes is None or role.peak_bytes <= role.memory_bytes
        assert not role.precisions
    assert summary(plan)["wrapper"] == "fsdp"
    assert "GiB and slow has" in plan.reasons[0]
    assert "FSDP2 shards it over 4 ranks" in plan.reasons[0]
    if batch == "fixed":
        assert set(plan.shares) == {2}
        assert plan.predicted.step_s > plan.predicted.plain_step_s  # what memory costs
    else:
        assert plan.shares[0] > plan.shares[-1]
    save_plan(plan, f"{tmp_path}/plan.json")
    assert load_plan(f"{tmp_path}/plan.json") == plan


@pytest.mark.parametrize("batch", ["fixed", "free"])
def test_ranks_are_lowered_under_fsdp_and_it_says_what_that_is_worth(batch: str) -> None:
    cluster = four(SMALL)
    own, plan = (
        planned(cluster, 8, batch=batch, layout="data", size=size, budget=1.0)
        for size in (float("inf"), 1e-4)
    )
    assert own.wrapper == plan.wrapper == "fsdp"
    lowered = {role.device for role in plan.roles.values() if role.precisions}
    assert lowered == {SLOW} if batch == "fixed" else lowered
    assert plan.predicted.damage > own.predicted.damage == 0
    assert plan.predicted.step_s * GAIN <= own.predicted.step_s
    for role in plan.roles.values():
        assert role.memory_bytes is None or role.peak_bytes <= role.memory_bytes
        assert role.choices
    alone, without = plan.predicted.alone, plan.predicted.without
    assert {"wrapper", "precision"} <= alone.keys()
    assert without["precision"] > plan.predicted.step_s
    assert all(seconds >= plan.predicted.step_s for name, seconds in without.items() if "rank" not in name)
    assert all(seconds >= plan.predicted.step_s for seconds in alone.values())
    assert "instead of plain FSDP2's" in plan.reasons[-1]


def test_simulating_the_plan_predicts_the_same() -> None:
    cluster = four(SMALL)
    plan = planned(cluster, 8, layout="data")
    assert setting_of(plan).sharding == Sharding()
    outcome = simulate(*_job(plan, cluster))
    assert outcome.timeline.step_s == pytest.approx(plan.predicted.step_s)
    assert {name: memory.peak for name, memory in outcome.memory.items()} == {
        name: role.peak_bytes for name, role in plan.roles.items()
    }
    assert setting_of(planned(four(1.0), 8, layout="data")).sharding is None


def _job(plan: Plan, cluster: Cluster) -> tuple[Cluster, Workload, JobSetting]:
    roles, setting = job_of(plan, cluster)
    return roles, workload(), setting


def test_shares_leave_out_no_memory() -> None:
    """With room for one sample only on slow ranks, the fast ones take the rest, though even shares were as fast."""
    cluster = four(SMALL)
    one, two = (sharded(cluster, 4 * samples).plain().replayed.peak(SLOW) for samples in (1, 2))
    plan = planned(four((one + two) / 2 / GIB), 8, budget=0.0)
    assert (plan.wrapper, plan.shares) == ("fsdp", (3, 3, 1, 1))


def test_hsdp_where_hosts_have_several_ranks_and_the_link_is_slow() -> None:
    cluster = four(SMALL, two_hosts=True)
    assert cluster.profile is not None
    slow_link = {
        name: replace(t, per_byte_s=100 * t.per_byte_s) for name, t in cluster.profile.links["lan"].items()
    }
    profile = replace(cluster.profile, links={**cluster.profile.links, "lan": slow_link})
    # A half of the model has to fit.
    room = replace(cluster.devices[SLOW], memory_gib=3_500_000 / GIB)
    cluster = replace(cluster, profile=profile, devices={**cluster.devices, SLOW: room})
    plan = planned(cluster, 8, bits=None, layout="data")
    assert (plan.wrapper, plan.shard_ranks) == ("fsdp", 2)
    assert "HSDP shards it inside each host over 2 ranks" in plan.reasons[0]


def test_bits_where_they_gain() -> None:
    cluster = four(SMALL)
    assert cluster.profile is not None
    slow_link = {
        name: replace(t, per_byte_s=100 * t.per_byte_s) for name, t in cluster.profile.links["lan"].items()
    }
    slow = replace(cluster, profile=replace(cluster.profile, links={"lan": slow_link}))
    assert planned(slow, 8).bits == 4
    exact = planned(slow, 8, bits=None)
    assert (exact.bits, exact.weight_bits) == (None, None)


def test_weights_in_fewer_bits_where_they_gain(tmp_path: object) -> None:
    """Beside gradients in fewer bits, in the plan's file, its hash and its reasons, and as simulated."""
    cluster = four(SMALL)
    assert cluster.profile is not None
    devices = {
        name: replace(device, codec={**device.codec, "8": device.codec["4"]})
        for name, device in cluster.profile.devices.items()
    }
    slow_link = {
        name: replace(t, per_byte_s=100 * t.per_byte_s) for name, t in cluster.profile.links["lan"].items()
    }
    profiles = {
        link: replace(cluster.profile, devices=devices, links={"lan": link_})
        for link, link_ in (("fast", cluster.profile.links["lan"]), ("slow", slow_link))
    }
    slow = replace(cluster, profile=profiles["slow"])
    plan = planned(slow, 8, bits=4, layout="data")
    assert (plan.wrapper, plan.bits, plan.weight_bits) == ("fsdp", 4, WEIGHT_BITS)
    assert setting_of(plan).sharding == Sharding(weight_bits=WEIGHT_BITS)
    assert plan.predicted.without["weight_bits"] > plan.predicted.step_s
    assert any("weights are gathered in 8 bits" in reason for reason in plan.reasons)
    save_plan(plan, f"{tmp_path}/plan.json")
    assert load_plan(f"{tmp_path}/plan.json") == plan
    assert replace(plan, weight_bits=None).hash != plan.hash
    outcome = simulate(*_job(plan, slow))
    assert outcome.timeline.step_s == pytest.approx(plan.predicted.step_s)
    for name, memory in outcome.memory.items():
        assert memory.peak == plan.roles[name].peak_bytes
        assert memory.codec > 0
    unmeasured = planned(
        replace(cluster, profile=replace(cluster.profile, links={"lan": slow_link})), 8, bits=4
    )
    assert (unmeasured.bits, unmeasured.weight_bits) == (4, None)


def test_bits_of_weights_belong_to_fsdp_with_bits() -> None:
    plan = planned(four(1.0), 8)
    with pytest.raises(ValidationError, match="weights are gathered in fewer bits only under FSDP2"):
        replace(plan, weight_bits=8)


def test_what_does_not_even_fit_sharded_says_so() -> None:
    with pytest.raises(
        TrimtabError, match="nor does it fit with FSDP2 over 4 ranks, where a rank with one sample needs"
    ):
        planned(four(500_000 / GIB), 8)


def sharded(cluster: Cluster, total: int, sharding: Sharding = Sharding()) -> PlanSearch:  # noqa: B008
    return PlanSearch(cluster, workload(), damages(), total, sharding=sharding)


def test_searches_say_what_fits() -> None:
    cluster = four(SMALL)
    whole, parts = PlanSearch(cluster, workload(), damages(), 4), sharded(cluster, 4)
    assert not whole.fits(whole.plain())
    assert parts.fits(parts.plain())
    assert parts.plain().replayed.peak(SLOW) < whole.plain().replayed.peak(SLOW)
    tiny = sharded(four(1000 / GIB), 4)
    assert not tiny.fits(tiny.plain())
    with pytest.raises(TrimtabError, match="same number of ranks, at least two"):
        sharded(cluster, 4, Sharding(hybrid=True)).plain()


def test_a_plan_for_fsdp_is_not_made_anew_for_other_numbers_of_ranks() -> None:
    plan = planned(four(SMALL), 8)
    assert plan_for_ranks(plan, devices_of(plan)) is plan
    with pytest.raises(TrimtabError, match="over 4 ranks, and what a rank of 3 would have to hold"):
        plan_for_ranks(plan, devices_of(plan)[:3])
