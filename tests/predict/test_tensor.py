"""Steps of tensor-parallel and data x tensor jobs, worked out by hand and against the replay of plain DDP."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.predict.profiles import FAST, SLOW, cluster, profile, workload

from trimtab.cluster import Cluster, Host
from trimtab.cluster.profile import Line
from trimtab.predict.operators.measured import Measured
from trimtab.predict.replay.inputs import Transfer
from trimtab.predict.step import JobSetting, RankSetting, predict_step
from trimtab.predict.tensor import TensorJob, TensorSetting
from trimtab.predict.tensor_stream import backward_stream
from trimtab.workload.units import sharded

if TYPE_CHECKING:
    from trimtab.cluster.profile import Profile

SAMPLES = 4
OPERATOR = 3e-3 * SAMPLES
"""Forward and backward of every operator on the fast device; the slow one takes twice as long."""


def counts(share: float) -> dict[str, int]:
    return {span.name: round(span.units * share) for span in workload().units}


def links(per_message: float, per_byte: float) -> Profile:
    given = profile()
    changed = {
        link: {
            name: replace(time, per_message_s=per_message, per_byte_s=per_byte, drag={})
            for name, time in collectives.items()
        }
        for link, collectives in given.links.items()
    }
    devices = {name: replace(own, optimiser=Line(a=0.0, c=0.0)) for name, own in given.devices.items()}
    return replace(given, links=changed, devices=devices)


def job(given: Profile, hosts: tuple[Host, ...] | None = None) -> TensorJob:
    changed = replace(cluster(), profile=given)
    if hosts is not None:
        changed = replace(changed, hosts=hosts)
    return TensorJob(Measured(workload(), given), changed)


def inside() -> int:
    return sum(len(span.into) + len(span.inside) + 1 for span in workload().units)


def setting(*shares: float, groups: tuple[tuple[int, ...], ...] = ((0, 1),)) -> TensorSetting:
    return TensorSetting(
        groups=groups, counts=tuple(map(counts, shares)), samples=(SAMPLES,) * len(groups), bits=None
    )


def test_the_slowest_rank_sets_the_pace_between_two_meetings() -> None:
    outside = len(workload().operators) - inside()
    even = job(links(0, 0)).step(setting(0.5, 0.5))
    assert even.step_s == pytest.approx(2 * OPERATOR * (outside + inside() * 0.5))
    # The slow rank does a quarter in the time of the fast one's half; what is replicated it does alone.
    uneven = job(links(0, 0)).step(setting(0.75, 0.25))
    own = [OPERATOR * (outside + 0.75 * inside()), 2 * OPERATOR * (outside + 0.25 * inside())]
    assert uneven.compute_s[0] == pytest.approx(own)
    assert max(own) < uneven.step_s < even.step_s


def test_a_block_is_summed_once_in_each_pass() -> None:
    free, costly = job(links(0, 0)).step(setting(0.5, 0.5)), job(links(1e-3, 1e-8)).step(setting(0.5, 0.5))
    operators = workload().at_batch(SAMPLES).operators
    moved = sum(
        operators[span.out].outputs[0].nbytes + operators[span.into[0]].input_tensors[0].nbytes
        for span in workload().units
    )
    # Two ranks: two messages that wait for each other, and each byte once.
    expected = 2 * len(workload().units) * 2 * 1e-3 + moved * 1e-8
    assert costly.all_reduce_s == pytest.approx(expected)
    # Those of the backward pass end before the weights' gradients are computed.
    assert costly.step_s - free.step_s == pytest.approx(expected / 2)


def test_every_sum_pauses_ranks_that_have_computed_until_then() -> None:
    free, given = job(links(0, 0)).step(setting(0.5, 0.5)), links(0, 0)
    paused = replace(
        given,
        links={
            link: {name: replace(time, awaited_message_s=5e-4) for name, time in collectives.items()}
            for link, collectives in given.links.items()
        },
    )
    assert job(paused).step(setting(0.5, 0.5)).all_reduce_s == pytest.approx(2 * len(workload().units) * 1e-3)
    assert free.all_reduce_s == 0


def test_weights_gradients_are_computed_while_the_gradient_of_the_input_is_summed() -> None:
    slow_link = 2.0
    free, costly = job(links(0, 0)).step(setting(0.5, 0.5)), job(links(slow_link, 0)).step(setting(0.5, 0.5))
    whole = job(links(0, 0)).operator_s(SLOW, SAMPLES)[1]
    late = sum(0.5 * 0.5 * whole[i] for span in workload().units for i in (*span.into, span.out))
    assert costly.step_s - free.step_s == pytest.approx(costly.all_reduce_s - late)


def test_a_rank_that_comes_early_computes_its_weights_gradients_while_it_waits() -> None:
    """Two ranks, one block, nothing takes time on the wire: only the slower rank counts."""
    meeting = {0: Transfer(latency_s=0.0, seconds=0.0)}
    stream = backward_stream([[4.0, 0.0], [2.0, 0.0]], meeting, {0: (0,)}, {0: (0,)})
    assert sum(part.seconds for part in stream) == 4
    assert [part.buckets for part in stream][-1] == (0,)
    # The early rank has 3 of 6 left when the late one arrives at 5, after waiting from 3 on: 1 remains.
    stream = backward_stream([[6.0, 0.0], [2.0, 4.0]], meeting, {0: (0,)}, {})
    assert sum(part.seconds for part in stream) == pytest.approx(6.0)
    # A transfer of 4 that takes half of the device hides 2 of the 3 late seconds.
    half = {0: Transfer(latency_s=0.0, seconds=4.0, drag=(0.5,))}
    assert sum(part.seconds for part in backward_stream([[6.0]], half, {0: (0,)}, {})) == pytest.approx(8.0)


@pytest.mark.parametrize("per_byte", [1e-9, 1e-6], ids=["hidden", "exposed"])
def test_groups_of_one_rank_are_plain_ddp(per_byte: float) -> None:
    given = links(1e-4, per_byte)
    alone = TensorSetting(groups=((0,), (1,)), counts=(counts(1.0),), samples=(SAMPLES, SAMPLES))
    plain = JobSetting(ranks={name: RankSetting(samples=SAMPLES, precisions={}) for name in (FAST, SLOW)})
    expected = predict_step(Measured(workload(), given), replace(cluster(), profile=given), plain)
    assert job(given).step(alone).step_s == pytest.approx(expected.step_s, rel=1e-6)


def four() -> tuple[Host, ...]:
    return tuple(
        Host(name=f"h{i}", devices={name: 1}, link="lan") for i, name in enumerate((FAST, SLOW, FAST, SLOW))
    )


def test_data_x_tensor_exchanges_shards_while_backward_goes_on() -> None:
    two = TensorSetting(
        groups=((0, 1), (2, 3)), counts=(counts(0.75), counts(0.25)), samples=(SAMPLES, SAMPLES)
    )
    one = job(links(0, 0), four()).step(setting(0.75, 0.25))
    assert job(links(0, 0), four()).step(two).step_s == pytest.approx(one.step_s)
    slow = job(links(0, 1e-6), four())
    step = slow.step(two)
    held = sum(p.tensor.nbytes for p in sharded(workload(), counts(0.75)).parameters)
    # Gradients and activations share the wire: nothing is faster than all of their bytes one after the other.
    assert step.step_s > held * 1e-6 + step.all_reduce_s
    assert step.exchange_s > 0
    less = replace(two, counts=(counts(0.5), counts(0.5)))
    assert slow.step(less).exchange_s < step.exchange_s


def test_groups_inside_a_host_do_not_use_the_link_between_hosts() -> None:
    hosts = (Host(name="a", devices={FAST: 2}, link="lan"), Host(name="b", devices={FAST: 2}, link="lan"))
    given = links(1e-4, 1e-6)
    within = replace(given, links={"lan": given.links["lan"], "local": links(0, 0).links["local"]})
    inside_hosts = replace(setting(0.5, 0.5, groups=((0, 1), (2, 3))))
    across = replace(inside_hosts, groups=((0, 2), (1, 3)))
    measured = job(within, hosts)
    assert measured.step(inside_hosts).all_reduce_s == 0
    assert measured.step(across).all_reduce_s > 0


def test_what_is_measured_inside_hosts_need_not_be_an_all_reduce() -> None:
    """A probe of several hosts measures how their ranks exchange values through shared memory, and nothing else."""
    given = links(1e-3, 1e-8)
    shared = replace(given.links["lan"]["all_gather"], per_message_s=5e-3, per_byte_s=0.0)
    local = {"all_gather": shared, "all_to_all": shared}
    two = tuple(Host(name=name, devices={FAST: 2}, link="lan") for name in "ab")
    pairs = setting(0.5, 0.5, groups=((0, 1), (2, 3)))
    step = job(replace(given, links={**given.links, "local": local}), two).step(pairs)
    blocks = len(workload().units)
    assert step.all_reduce_s == pytest.approx(2 * blocks * 2 * 5e-3), "two messages, in both passes"


def test_compressed_shards_are_sent_sooner() -> None:
    two = TensorSetting(groups=((0, 1), (2, 3)), counts=(counts(0.5),) * 2, samples=(SAMPLES, SAMPLES))
    slow = job(links(0, 1e-6), four())
    assert slow.step(replace(two, bits=4)).exchange_s < 0.5 * slow.step(two).exchange_s


def test_a_share_takes_memory_and_time_in_proportion() -> None:
    predictor = job(links(0, 0))
    whole, half, none = (predictor.memory(FAST, counts(share), SAMPLES, 1) for share in (1.0, 0.5, 0.0))
    assert whole - half == pytest.approx(half - none, rel=0.1)
    outside = len(workload().operators) - inside()
    fast, slow = predictor.share_times((FAST, SLOW), SAMPLES)
    assert fast.seconds(0.25) == pytest.approx(OPERATOR * (outside + 0.25 * inside()))
    assert slow.whole == pytest.approx(2 * fast.whole)


def test_ten_thousand_ranks_cost_no_more_than_two_classes() -> None:
    many = Cluster(
        version=1,
        devices=cluster().devices,
        links=cluster().links,
        hosts=(
            Host(name="a", devices={FAST: 8}, link="lan", count=625),
            Host(name="b", devices={SLOW: 8}, link="lan", count=625),
        ),
        profile=profile(),
    )
    predictor = TensorJob(Measured(workload(), profile()), many)
    groups = tuple((rank, rank + 1) for rank in range(0, 10_000, 2))
    step = predictor.step(
        TensorSetting(groups=groups, counts=(counts(0.5),) * 2, samples=(SAMPLES,) * len(groups))
    )
    assert len(predictor._groups) == 2
    assert step.step_s > 0
