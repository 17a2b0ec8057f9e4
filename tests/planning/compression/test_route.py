"""The route of a bucket: what the model of each way must say, without a process group."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planning.planning import behind_a_slow_link, three

from trimtab.cluster.profile import CodecTime, Line
from trimtab.collectives import Method as ReductionMethod
from trimtab.errors import TrimtabError
from trimtab.planning.compression.route import (
    EXTRA_LEVEL_RATIO,
    MOST_ROUNDINGS,
    RouteChoice,
    choose_route,
    named_route,
    sparing_route,
)
from trimtab.predict.collectives import Method, Placement, Route, stages
from trimtab.predict.links import Fit, JobLinks

MB = 1_000_000


def chosen(
    hosts: list[int],
    nbytes: int,
    payload: int,
    *,
    gbit: float = 1.0,
    latency_s: float = 1e-4,
    inside_gb: float = 4.0,
    codec_gb: float = 3.0,
) -> RouteChoice:
    placement = Placement.of(hosts)
    links = JobLinks.uniform(
        Fit(per_message_s=latency_s, per_byte_s=8e-9 / gbit),
        Fit(per_message_s=2e-5, per_byte_s=1e-9 / inside_gb),
        classes=len(placement.classes),
    )
    line = Line(a=4e-9 / codec_gb, c=1e-6)
    return choose_route(
        placement, nbytes // 4, payload, links, [CodecTime(encode=line, decode=line, add=line)]
    )


def two_levels(choice: RouteChoice) -> bool:
    return choice.route.inside is not None


def test_several_ranks_a_host_and_a_slow_link_take_two_levels() -> None:
    choice = chosen([2, 2], 100 * MB, 13 * MB)
    assert two_levels(choice)
    assert choice.route.method == "all_gather"
    assert "2 hosts of 2 ranks, 100 MB" in choice.reason
    assert "best flat route" in choice.reason


def test_one_rank_a_host_has_no_second_level() -> None:
    choice = chosen([1, 1, 1, 1], 100 * MB, 13 * MB)
    assert (two_levels(choice), choice.route.method) == (False, "scatter_reduce")
    assert not any(name.startswith("two levels") for name in choice.others)


@pytest.mark.parametrize(("hosts", "shape"), [([4, 3], "3 to 4"), ([1, 3], "1 to 3"), ([4, 2, 2], "2 to 4")])
def test_unequal_hosts_have_two_levels(hosts: list[int], shape: str) -> None:
    choice = chosen(hosts, 100 * MB, 13 * MB, gbit=0.2)
    assert two_levels(choice)
    assert f"{len(hosts)} hosts of {shape} ranks" in choice.reason


def test_one_rank_that_does_all_the_work_of_its_host_is_no_gain() -> None:
    """Measured at 1 Gbit/s: hosts of one and three ranks take 0.85 of the speed of the flat route in two levels."""
    assert not two_levels(chosen([1, 3], 100 * MB, 13 * MB))


@given(
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.floats(0.1, 100.0),
    st.floats(0.5, 10.0),
    st.floats(0.2, 10.0),
)
def test_two_levels_are_never_taken_where_a_flat_route_is_about_as_fast(
    hosts: list[int], gbit: float, inside_gb: float, codec_gb: float
) -> None:
    choice = chosen(hosts, 25 * MB, 3 * MB, gbit=gbit, inside_gb=inside_gb, codec_gb=codec_gb)
    if two_levels(choice):
        flat_s = min(seconds for name, seconds in choice.others.items() if name.startswith("flat"))
        default_s = min(choice.others["flat scatter-reduce"], choice.others["flat all-gather"])
        assert choice.seconds <= min(flat_s, EXTRA_LEVEL_RATIO * default_s)


def test_a_route_is_requested_by_name() -> None:
    assert named_route("flat") == Route()
    assert named_route("two-level") == Route(inside="shared_memory")
    assert named_route("ring") == Route(method="ring")
    assert named_route("two_level scatter-reduce") == Route(method="scatter_reduce", inside="shared_memory")
    for wrong in ("star", "two-level star", "ring flat", ""):
        with pytest.raises(TrimtabError, match="there is no such route; give flat or two-level"):
            named_route(wrong)


def test_one_host_sums_exactly_when_its_memory_is_fast() -> None:
    assert two_levels(chosen([4], 100 * MB, 13 * MB, inside_gb=10.0))
    slow = chosen([4], 100 * MB, 13 * MB, inside_gb=0.05, codec_gb=10.0)
    assert not two_levels(slow), "cards without peer access, over a slow bus: compress inside the host too"


def test_small_buckets_on_many_ranks_take_the_fewest_messages() -> None:
    small = chosen([1] * 16, 4_000, 600, gbit=10.0, latency_s=5e-3)
    assert small.route.method in ("halving", "tree")
    large = chosen([1] * 16, 400 * MB, 52 * MB, gbit=0.1, latency_s=1e-4)
    assert large.route.method == "scatter_reduce"


def test_a_thousand_hosts_exchange_halves_and_never_pass_around_a_ring() -> None:
    choice = chosen([8] * 1000, 25 * MB, 3 * MB, gbit=10.0, latency_s=2e-5)
    assert (two_levels(choice), choice.route.method) == (True, "halving")
    assert not any("ring" in name for name in choice.others), "1,000 roundings"
    for hosts in (16, 128, 1024):
        way = stages(choice.route, Placement.of([8] * hosts), 6 * MB, 3 * MB)
        assert way.roundings <= MOST_ROUNDINGS
        assert sum(traffic.waits for traffic in way.traffic) == 2 * (hosts.bit_length() - 1)


def test_of_flat_routes_a_ring_is_fastest_where_hosts_share_one_interface() -> None:
    # Scatter-reduce sends 8 x 7/15 payloads through the larger host's interface, the ring 14/15.
    uneven = chosen([8, 7], 100 * MB, 13 * MB, gbit=0.1)
    assert two_levels(uneven)
    flat = {name: seconds for name, seconds in uneven.others.items() if name.startswith("flat")}
    assert min(flat, key=lambda name: flat[name]) == "flat ring"


def test_the_methods_are_those_of_the_reductions() -> None:
    assert get_args(Method) == get_args(ReductionMethod)


def test_what_no_bucket_has_is_refused() -> None:
    with pytest.raises(ValueError, match="got -1"):
        chosen([1], -4, 1)


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=8),
    st.integers(0, 10**9),
    st.floats(0.01, 100.0),
    st.floats(0.1, 1000.0),
)
def test_the_choice_is_never_much_slower_than_the_fastest(
    hosts: list[int], nbytes: int, gbit: float, inside_gb: float
) -> None:
    choice = chosen(hosts, nbytes, nbytes // 8, gbit=gbit, inside_gb=inside_gb)
    assert choice.seconds * 0.85 <= min(choice.others.values()) + 1e-12
    assert choice.seconds in choice.others.values()


@given(st.integers(2, 6), st.integers(2, 8), st.integers(MB, 500 * MB))
def test_a_slower_link_never_makes_two_levels_less_worth(hosts: int, local: int, nbytes: int) -> None:
    levels = [
        two_levels(chosen([local] * hosts, nbytes, nbytes // 8, gbit=gbit))
        for gbit in (100.0, 10.0, 1.0, 0.1)
    ]
    assert levels == sorted(levels)


def test_ranks_behind_slow_links_are_spared() -> None:
    cluster = behind_a_slow_link(5.0)
    assert cluster.profile is not None
    assert sparing_route(cluster, cluster.profile) == Route(spared=(2,))
    alike = behind_a_slow_link(1.2)
    assert alike.profile is not None
    assert sparing_route(alike, alike.profile) is None
    same = three(three=2)
    assert same.profile is not None
    assert sparing_route(same, same.profile) is None, "all hosts have one class of link"
