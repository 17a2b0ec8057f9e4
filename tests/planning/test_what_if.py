"""What-if simulation: every change by itself, and every mistake by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.predict.profiles import FAST, SLOW, cluster, workload

from trimtab.cluster import Device, Host, Link
from trimtab.errors import TrimtabError
from trimtab.planning.plan import PLAN_VERSION, Plan, Predicted, Role
from trimtab.planning.what_if import (
    even,
    planned,
    simulate,
    what_ifs,
)
from trimtab.predict.step import JobSetting, RankSetting


def test_cost_counts_every_rank() -> None:
    given = simulate(cluster(), workload())
    assert given.cost_per_million is not None
    assert given.cost_per_million == pytest.approx(1.5 / 3600 / given.samples_per_s * 1e6)
    unpriced = replace(cluster(), devices={**cluster().devices, SLOW: Device(kind="cpu", speed=0.5)})
    assert simulate(unpriced, workload()).cost_per_million is None


@settings(max_examples=12, deadline=None)
@given(
    hosts=st.sampled_from([1, 3, 20, 125, 1250]),
    local=st.sampled_from([1, 2, 8]),
    gbit=st.sampled_from([0.1, 1.0, 10.0, 100.0]),
    latency_us=st.sampled_from([1.0, 50.0]),
)
def test_advice_never_contradicts_the_table(hosts: int, local: int, gbit: float, latency_us: float) -> None:
    many = replace(
        cluster(),
        links={"far": Link(gbit_per_s=gbit, latency_us=latency_us)},
        hosts=(
            Host(name="a", devices={FAST: local}, link="far", count=hosts),
            Host(name="b", devices={SLOW: local}, link="far"),
        ),
    )
    plain, fewer = what_ifs(many, workload(), even(many, 2), bits=4)
    helps = fewer.timeline.step_s < plain.timeline.step_s
    if plain.advice:
        assert "in 4 bits a step would take" in plain.advice
        assert ("would not help" in plain.advice) == (not helps)
    if fewer.advice:
        assert ("would not help" in fewer.advice) == helps
    assert "fewer" not in plain.words()


def test_a_plan_is_not_told_to_share_better() -> None:
    """It has looked for better shares and precisions; only a job that nobody planned is sent to `trimtab plan`."""
    given, *_ = what_ifs(cluster(), workload(), even(cluster(), 4))
    assert "the devices of slow" in given.words()
    assert "`trimtab plan` says whether" in given.words()
    ours, *_ = what_ifs(cluster(), workload(), even(cluster(), 4), of_plan=True)
    assert ours.words() == given.words().split(";")[0]


def test_a_thousand_ranks_gain_by_fewer_bits() -> None:
    many = replace(
        cluster(),
        links={"far": Link(gbit_per_s=1.0, latency_us=50.0)},
        hosts=(Host(name="a", devices={FAST: 8}, link="far", count=125),),
    )
    plain, fewer = what_ifs(many, workload(), even(many, 2), bits=4)
    assert fewer.setting.route is not None
    assert fewer.setting.route.inside == "shared_memory"
    assert fewer.timeline.step_s < plain.timeline.step_s


def test_what_does_not_fit_is_said() -> None:
    small = replace(
        cluster(), devices={**cluster().devices, SLOW: Device(kind="cpu", speed=0.5, memory_gib=1e-4)}
    )
    assert "slow has 0.0001 GiB and needs" in simulate(small, workload()).words()
    assert "GiB" not in simulate(cluster(), workload()).words()


def test_a_cluster_without_measurements_says_how_to_get_them() -> None:
    with pytest.raises(TrimtabError, match="holds no measurements; run `trimtab probe"):
        simulate(replace(cluster(), profile=None), workload())


def plan(**roles: Role) -> Plan:
    return Plan(
        version=PLAN_VERSION,
        trimtab="0",
        model="m",
        batch="free",
        bits=4,
        roles=roles,
        ranks=tuple((name, 1) for name in roles),
        predicted=Predicted(step_s=1.0, plain_step_s=1.0, damage=0.0, uniform_damage=0.0),
    )


def role(device: str, samples: int, **precisions: str) -> Role:
    return Role(device=device, samples=samples, precisions=precisions, compute_s=1.0, peak_bytes=0)


def test_a_plan_speaks_of_roles() -> None:
    given, setting = planned(plan(most=role(FAST, 3), least=role(SLOW, 1, head="int8")), cluster())
    assert setting.bits == 4
    assert setting.ranks["most"].samples == 3
    assert setting.ranks["least"].precisions == {"head": "int8"}
    found = simulate(given, workload(), setting)
    assert [r.name for r in found.timeline.roles] == ["most", "least"]
    by_class = JobSetting(
        ranks={
            FAST: RankSetting(samples=3, precisions={}),
            SLOW: RankSetting(samples=1, precisions={"head": "int8"}),
        },
        bits=4,
    )
    assert found.timeline.step_s == simulate(cluster(), workload(), by_class).timeline.step_s


def test_a_plan_for_another_cluster_is_refused() -> None:
    with pytest.raises(TrimtabError, match="for 1 ranks, and the cluster has 2"):
        planned(plan(most=role(FAST, 3)), cluster())
    with pytest.raises(TrimtabError, match="rank 0 is of device class 'fast' in the cluster and of 'slow'"):
        planned(plan(most=role(SLOW, 3), least=role(FAST, 1)), cluster())


def test_a_plan_that_is_not_replayed_says_what_it_predicts() -> None:
    together = replace(plan(most=role(FAST, 3), least=role(SLOW, 3)), tensor_groups=((0, 1),))
    with pytest.raises(
        TrimtabError, match=r"uses tensor parallelism; the plan itself holds .* 1000 ms a step"
    ):
        planned(together, cluster())


def test_micro_batches_are_what_was_probed_or_not() -> None:
    whole = even(cluster(), 24)
    far = simulate(cluster(), workload(), whole).out_of_reach
    assert far is not None
    assert "has 24 samples and was probed at 2, 6" in far
    assert simulate(cluster(), workload(), replace(whole, accumulate=4)).out_of_reach is None
