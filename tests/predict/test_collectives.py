"""What each route sends: by its formula, and as counted on emulated hosts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.requirements import requires

from trimtab.cluster import Cluster, Device, Host, Link
from trimtab.emulate import Emulation
from trimtab.predict.collectives import (
    METHODS,
    Placement,
    Route,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    stages,
    tree_all_reduce,
)
from trimtab.predict.links import Fit
from trimtab.wire_format import encoded_bytes

NUMEL, BITS, BLOCK = 1 << 19, 8, 1024
"""Those of `traffic_script`."""


def test_two_hosts() -> None:
    two = Placement.of((1, 1))
    assert (all_reduce(1000, two).messages, *all_reduce(1000, two).nbytes) == (2, 1000)
    assert (all_gather(1000, two).messages, *all_gather(1000, two).nbytes) == (1, 1000)
    assert (all_to_all(1000, two).messages, *all_to_all(1000, two).nbytes) == (1, 1000)


def test_a_host_with_several_ranks_sends_what_all_of_them_send_to_others() -> None:
    placement = Placement.of((2, 2))
    # Of three equal parts two go to the other host, from each of two ranks.
    sent = all_to_all(3000, placement)
    assert (sent.waits, sent.beside, *sent.nbytes) == (1, 2, 4000)
    assert (all_reduce(1000, placement).waits, *all_reduce(1000, placement).nbytes) == (6, 1500)
    unequal = Placement.of((3, 1))
    assert all_to_all(3000, unequal).nbytes == (3000, 3000)


def test_reduce_scatter_is_half_an_all_reduce_on_a_ring_and_a_whole_one_in_gloo() -> None:
    four = Placement.of((1, 1, 1, 1))
    around = reduce_scatter(1000, four, ring=True)
    assert (around.waits, *around.nbytes) == (3, 750)
    assert reduce_scatter(1000, four, ring=False) == all_reduce(1000, four)


def test_one_rank_sends_nothing() -> None:
    for collective in (all_reduce, all_gather, all_to_all, partial(reduce_scatter, ring=True)):
        alone = collective(1000, Placement.of((1,)))
        assert (alone.messages, *alone.nbytes) == (0, 0)


def test_latency_grows_with_the_logarithm_where_the_algorithm_does() -> None:
    for hosts in (2, 16, 1024):
        placement = Placement.of([1] * hosts)
        levels = hosts.bit_length() - 1
        assert tree_all_reduce(1000, placement).waits == 2 * levels
        assert all_reduce(1000, placement).waits == 2 * (hosts - 1)
        for method in ("tree", "halving"):
            way = stages(Route(method=method), placement, NUMEL, NUMEL // 2)
            assert [traffic.waits for traffic in way.traffic] == [levels, levels]


def test_the_slowest_interface_counts() -> None:
    cluster = Cluster(
        version=1,
        devices={"d": Device(kind="cpu", speed=1.0)},
        links={"fast": Link(gbit_per_s=10.0), "slow": Link(gbit_per_s=1.0)},
        hosts=(
            Host(name="a", devices={"d": 8}, link="fast", count=100),
            Host(name="b", devices={"d": 1}, link="slow", count=1),
        ),
    )
    placement = Placement.on(cluster)
    assert [(one.ranks, one.count, one.link) for one in placement.classes] == [
        (8, 100, "fast"),
        (1, 1, "slow"),
    ]
    fast, slow = Fit(per_message_s=0.0, per_byte_s=1.0), Fit(per_message_s=0.0, per_byte_s=10.0)
    sent = all_to_all(800, placement)
    assert sent.nbytes == (8 * 793, 800)
    assert sent.seconds((fast, slow)) == 8000
    assert sent.seconds((fast, fast)) == 8 * 793


def test_a_spared_host_carries_a_bucket_once_in_each_direction() -> None:
    cluster = Cluster(
        version=1,
        devices={"d": Device(kind="cpu", speed=1.0)},
        links={"fast": Link(gbit_per_s=1.0), "slow": Link(gbit_per_s=0.2)},
        hosts=(
            Host(name="a", devices={"d": 2}, link="fast"),
            Host(name="b", devices={"d": 1}, link="fast"),
            Host(name="c", devices={"d": 1}, link="slow"),
        ),
    )
    route = Route(spared=(3,))
    placement = Placement.on(cluster, route)
    assert [one.spared for one in placement.classes] == [False, False, True]
    assert (placement.world, placement.owners) == (4, 3)
    way = stages(route, placement, NUMEL, 300_000)
    there, back = way.traffic
    # Of three owners, two on host a: its ranks each get a third from b and c, b's rank from the three others.
    assert there.nbytes == back.nbytes == (400_000, 300_000, 300_000)
    assert (there.ways[2], back.ways[2]) == ("out", "in")
    fast, slow = Fit(per_message_s=0.0, per_byte_s=1.0), Fit(per_message_s=0.0, per_byte_s=5.0)
    assert (there.way((fast, fast, slow)), back.way((fast, fast, slow))) == ("out", "in")
    assert there.way((fast, fast, fast)) == "both"
    # All values are encoded once by every rank; who owns none has no sums to encode.
    encoded = [sum(work.encoded for work in works) for works in (way.work, way.spared_work)]
    assert encoded == [NUMEL, NUMEL]
    assert way.spared_work[1].added == 0
    assert Route(spared=(3,)).name == "flat default, rank 3 owns no chunk"
    assert Route(spared=(3, 4)).name == "flat default, ranks 3, 4 own no chunk"


@given(st.integers(2, 10_000), st.sampled_from(METHODS), st.integers(1, 8))
def test_work_and_bytes_of_a_rank_do_not_grow_with_ranks_unless_it_gathers_all(
    hosts: int, method: Any, local: int
) -> None:
    way = stages(Route(method=method), Placement.of([local] * hosts), NUMEL, NUMEL // 2)
    values = sum(work.encoded + work.decoded + work.added for work in way.work)
    calls = sum(work.encodes + work.decodes + work.adds for work in way.work)
    assert len(way.work) == len(way.traffic) + 1
    if method == "halving":
        assert values <= 8 * NUMEL
        assert calls <= 2 * 18
    if method in ("scatter_reduce", "ring"):
        assert values <= 7 * NUMEL
    if method == "all_gather":
        assert values == pytest.approx((hosts * local + 1) * NUMEL)


def _cluster(*ranks: int) -> Cluster:
    return Cluster(
        version=1,
        devices={"d": Device(kind="cpu", speed=1.0)},
        links={"lan": Link(gbit_per_s=10.0)},
        hosts=tuple(
            Host(name=name, devices={"d": count}, link="lan")
            for name, count in zip("abcd", ranks, strict=False)
        ),
    )


@requires(root=True, tools=["ip", "tc", "nsenter"])
@pytest.mark.parametrize("ranks", [pytest.param((2, 2), marks=pytest.mark.soak), (2, 1)])
def test_hosts_send_what_the_formulas_say(ranks: tuple[int, ...]) -> None:
    cluster = _cluster(*ranks)
    with Emulation(cluster) as emulation:
        script = str(Path(__file__).with_name("traffic_script.py"))
        outcome = emulation.run([script], capture=True, timeout=200)
    assert outcome.failure is None
    rows = json.loads(outcome.stdout)
    placement = Placement.on(cluster)
    if ranks == (2, 2):  # Gloo reduce-scatters by an all-reduce
        sent = max(max(both) for both in rows.pop()["passed"].values())
        assert 0.97 <= sent / reduce_scatter(4 * NUMEL, placement, ring=False).nbytes[0] <= 1.06
    sparing = rows.pop()
    assert len(rows) == 12
    of_host = [next(i for i, one in enumerate(placement.classes) if one.ranks == own) for own in ranks]
    payload = encoded_bytes(NUMEL, BITS, BLOCK)
    route = Route(spared=tuple(sparing["spared"]))
    way = stages(route, Placement.on(cluster, route), NUMEL, payload)
    for host in range(len(ranks)):
        # One collective goes to the owners, the other comes from them.
        counted_bytes = sum(sparing["passed"][str(host)])
        assert 0.97 <= counted_bytes / sum(traffic.nbytes[host] for traffic in way.traffic) <= 1.06, sparing
    for row in rows:
        route = Route(method=row["method"], inside="shared_memory" if row["two_levels"] else None)
        way = stages(route, placement, NUMEL, payload)
        expected = [sum(traffic.nbytes[kind] for traffic in way.traffic) for kind in of_host]
        # A tree's root receives in one stage and sends in the other; all others do both at once.
        both = sum if row["method"] == "tree" else max
        counted = [both(row["passed"][str(host)]) for host in range(len(ranks))]
        # Headers, acknowledgments and barriers add a little. Only a tree's root sends all that the formula says, and
        # of unequal hosts trees and halves are bounded from above.
        least = 0.97 if ranks == (2, 2) or row["method"] not in ("tree", "halving") else 0.2
        hosts = [counted.index(max(counted))] if row["method"] in ("tree", "halving") else range(len(ranks))
        for host in hosts:
            assert least <= counted[host] / expected[host] <= 1.06, (row, expected)
        if row["method"] in ("ring", "halving"):
            # What a rank posts itself, as opposed to the all-gather after a ring of more than two.
            taking_part = len(ranks) if row["two_levels"] else sum(ranks)
            own = way.traffic[:1] if row["method"] == "ring" and taking_part > 2 else way.traffic
            assert row["posted"] == sum(traffic.waits for traffic in own), row
