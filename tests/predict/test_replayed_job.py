"""A job whose precisions are tried out: the same times as a prediction from nothing, and exactly taken back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.predict.profiles import FAST, SLOW, cluster, profile, workload

from trimtab.cluster import Cluster, Device, Host
from trimtab.errors import TrimtabError
from trimtab.precision_names import OWN
from trimtab.predict.operators.measured import Measured
from trimtab.predict.operators.measured_precisions import MeasuredPrecisions, probed
from trimtab.predict.replayed_job import ReplayedJob, RoleSetting, by_roles
from trimtab.predict.step import JobSetting, RankSetting, predict_memory, predict_step
from trimtab.predict.step_setting import StepSetting

RANKS = ((FAST, 1), (SLOW, 1))


def offers() -> MeasuredPrecisions:
    return MeasuredPrecisions(Measured(workload(), profile()))


def setting(samples: int, device: str, **precisions: str) -> RoleSetting:
    return RoleSetting(device=device, samples=samples, precisions=precisions)


def pace(bits: int | None = None, **precisions: str) -> ReplayedJob:
    roles = {FAST: setting(3, FAST), SLOW: setting(2, SLOW, **precisions)}
    return ReplayedJob(offers(), cluster(), roles, RANKS, StepSetting(bits=bits))


def lowered() -> dict[str, str]:
    names = [name for name in workload().settings if offers().precisions(SLOW, 2)[name]]
    return dict.fromkeys(names[::2], "int8")


@pytest.mark.parametrize("bits", [None, 4])
def test_after_any_changes_it_is_what_a_prediction_from_nothing_gives(bits: int | None) -> None:
    tried = pace(bits)
    for name, precision in lowered().items():
        tried.change(SLOW, name, precision)
    job = JobSetting(
        ranks={
            FAST: RankSetting(samples=3, precisions={}),
            SLOW: RankSetting(samples=2, precisions=lowered()),
        },
        bits=bits,
    )
    measured = Measured(workload(), profile())
    expected = predict_step(measured, cluster(), job)
    assert tried.step_s() == pytest.approx(expected.step_s, rel=1e-12)
    assert tried.timeline().roles == expected.roles
    assert tried.peak(SLOW) == predict_memory(measured, cluster(), job)[SLOW].peak
    assert pace(bits, **lowered()).step_s() == tried.step_s()


def test_a_change_is_taken_back_to_the_bit() -> None:
    tried = pace()
    before = tried.step_s(), tried.compute_s(SLOW), tried.peak(SLOW), tried.mappers[SLOW].forward_s[:]
    changes = [tried.change(SLOW, name, precision) for name, precision in lowered().items()]
    assert tried.step_s() < before[0]
    assert tried.compute_s(FAST) == pace().compute_s(FAST)
    for change in reversed(changes):
        tried.undo(change)
    after = tried.step_s(), tried.compute_s(SLOW), tried.peak(SLOW), tried.mappers[SLOW].forward_s[:]
    assert after == before
    for name in lowered():
        tried.change(SLOW, name, "int8")
        tried.change(SLOW, name, OWN)
    assert tried.step_s() == before[0]


def test_only_what_was_probed_is_offered() -> None:
    assert probed(profile(), SLOW) == ("fp32", "int8")
    offered = offers().precisions(SLOW, 3)
    kinds = {name: workload().operators[indices[0]].kind for name, indices in workload().settings.items()}
    assert {name for name, several in offered.items() if several} == {
        name for name, kind in kinds.items() if kind == "linear"
    }
    assert set(offered) == set(workload().settings)


def test_an_operator_that_does_not_exist_is_named() -> None:
    with pytest.raises(TrimtabError, match=r"'no\.such' is not an operator of"):
        pace().change(SLOW, "no.such", "int8")


def test_two_roles_may_have_devices_of_one_class() -> None:
    both = replace(cluster(), hosts=(Host(name="a", devices={FAST: 3}, link="lan"), cluster().hosts[1]))
    roles = {"more": setting(3, FAST), "less": setting(2, FAST), SLOW: setting(1, SLOW)}
    ranks = (("more", 1), ("less", 2), (SLOW, 1))
    changed, _ = by_roles(both, roles, ranks)
    assert [rank.device for rank in changed.ranks()] == ["more", "less", "less", SLOW]
    tried = ReplayedJob(offers(), both, roles, ranks)
    assert tried.compute_s("more") == pytest.approx(1.5 * tried.compute_s("less"))
    assert {role.name: role.ranks for role in tried.timeline().roles} == {"more": 1, "less": 2, SLOW: 1}


def test_a_device_nobody_measured_is_named() -> None:
    unknown = Cluster(
        version=1,
        devices={**cluster().devices, "odd": Device(kind="cpu", speed=1.0)},
        links=cluster().links,
        hosts=(cluster().hosts[0], Host(name="b", devices={"odd": 1}, link="lan")),
        profile=profile(),
    )
    roles = {FAST: setting(1, FAST), "odd": setting(1, "odd")}
    with pytest.raises(TrimtabError, match="device class 'odd' was not measured"):
        ReplayedJob(offers(), unknown, roles, ((FAST, 1), ("odd", 1)))


def test_one_rank_meets_nobody() -> None:
    alone = replace(cluster(), hosts=cluster().hosts[:1])
    tried = ReplayedJob(offers(), alone, {FAST: setting(2, FAST)}, ((FAST, 1),))
    name = next(iter(lowered()))
    before = tried.step_s()
    tried.change(FAST, name, "int8")
    assert tried.step_s() < before
