"""The route of a bucket: what the model of each way must say, without a process group."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.collectives import Method as ReductionMethod
from trimtab.planning.compression.route import Method, choose_route
from trimtab.predict.host_links import HostLinks, LinkSpeed

MB = 1_000_000


def links(
    *, gbit: float = 1.0, latency_s: float = 1e-4, inside_gb: float = 4.0, codec_gb: float = 3.0
) -> HostLinks:
    return HostLinks(
        between=LinkSpeed(latency_s=latency_s, bytes_per_s=gbit * 1e9 / 8),
        inside=LinkSpeed(latency_s=2e-5, bytes_per_s=inside_gb * 1e9),
        codec_bytes_per_s=codec_gb * 1e9,
    )


def test_several_ranks_a_host_and_a_slow_link_take_two_levels() -> None:
    route = choose_route([2, 2], 100 * MB, 13 * MB, links())
    assert route.hierarchical
    assert route.method == "all_gather"
    assert "2 hosts of 2 ranks, 100 MB" in route.reason
    assert "best flat route" in route.reason


def test_one_rank_a_host_has_no_second_level() -> None:
    route = choose_route([1, 1, 1, 1], 100 * MB, 13 * MB, links())
    assert (route.hierarchical, route.method) == (False, "scatter_reduce")
    assert not any(name.startswith("two levels") for name in route.others)


def test_unequal_hosts_stay_flat_and_say_why() -> None:
    route = choose_route([4, 3], 100 * MB, 13 * MB, links())
    assert not route.hierarchical
    assert "unequal: no second level" in route.reason


def test_one_host_sums_exactly_when_its_memory_is_fast() -> None:
    assert choose_route([4], 100 * MB, 13 * MB, links(inside_gb=10.0)).hierarchical
    slow = choose_route([4], 100 * MB, 13 * MB, links(inside_gb=0.05, codec_gb=10.0))
    assert not slow.hierarchical, "cards without peer access, over a slow bus: compress inside the host too"


def test_small_buckets_on_many_ranks_take_the_fewest_messages() -> None:
    slow_to_answer = links(gbit=10.0, latency_s=5e-3)
    small = choose_route([1] * 16, 4_000, 600, slow_to_answer)
    assert small.method in ("all_gather", "tree")
    assert choose_route([1] * 16, 100 * MB, 13 * MB, slow_to_answer).method in ("scatter_reduce", "ring")


def test_a_ring_is_taken_where_hosts_share_one_interface_and_no_second_level_can_be() -> None:
    # Scatter-reduce sends 8 x 8/16 payloads twice through each interface, the ring 15/16 twice.
    uneven = choose_route([8, 7], 100 * MB, 13 * MB, links(gbit=0.1))
    assert uneven.method == "ring"


def test_the_methods_are_those_of_the_reductions() -> None:
    assert get_args(Method) == get_args(ReductionMethod)


@pytest.mark.parametrize(("hosts", "nbytes"), [([], 1), ([0], 1), ([1], -1)])
def test_what_no_job_has_is_refused(hosts: list[int], nbytes: int) -> None:
    with pytest.raises(ValueError, match="got"):
        choose_route(hosts, nbytes, 1, links())


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=8),
    st.integers(0, 10**9),
    st.floats(0.01, 100.0),
    st.floats(0.1, 1000.0),
)
def test_the_choice_is_never_much_slower_than_the_fastest(
    hosts: list[int], nbytes: int, gbit: float, inside_gb: float
) -> None:
    route = choose_route(hosts, nbytes, nbytes // 8, links(gbit=gbit, inside_gb=inside_gb))
    assert route.seconds * 0.85 <= min(route.others.values()) + 1e-12
    assert route.seconds in route.others.values()


@given(st.integers(2, 6), st.integers(2, 8), st.integers(MB, 500 * MB))
def test_a_slower_link_never_makes_two_levels_less_worth(hosts: int, local: int, nbytes: int) -> None:
    chosen = [
        choose_route([local] * hosts, nbytes, nbytes // 8, links(gbit=gbit)).hierarchical
        for gbit in (100.0, 10.0, 1.0, 0.1)
    ]
    assert chosen == sorted(chosen)
