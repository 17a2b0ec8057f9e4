"""Emulated clusters: speeds, links, device classes; and link rates."""

from __future__ import annotations

import pytest

from trimtab.bench.ranks import hosts, slices, two_hosts
from trimtab.cluster import parse_rate
from trimtab.errors import TrimtabError


def test_a_host_for_each_speed() -> None:
    cluster = hosts((1.0, 0.5), link="100mbit", names=("fast", "slow"), per_host=2)
    assert [(rank.host, rank.device) for rank in cluster.ranks()] == [
        ("fast", "fast"),
        ("fast", "fast"),
        ("slow", "slow"),
        ("slow", "slow"),
    ]
    assert [cluster.devices[name].speed for name in ("fast", "slow")] == [1.0, 0.5]
    assert cluster.links["link"].gbit_per_s == pytest.approx(0.1)
    assert {host.link for host in cluster.hosts} == {"link"}


def test_equal_ranks_are_of_one_device_class() -> None:
    cluster = two_hosts("none")
    assert list(cluster.devices) == ["a"]
    assert cluster.links == {}
    assert {host.link for host in cluster.hosts} == {None}
    parts = slices(6)
    assert parts.world_size == 6
    assert [device.kind for device in parts.devices.values()] == ["cuda"]


def test_link_rates() -> None:
    assert parse_rate("1gbit") == 1.0
    assert parse_rate("100mbit") == pytest.approx(0.1)
    assert parse_rate("2.5Gbit") == 2.5
    for text in ("fast", "0gbit", "-1gbit", "gbit", "1"):
        with pytest.raises(TrimtabError, match="not a link rate"):
            parse_rate(text)
