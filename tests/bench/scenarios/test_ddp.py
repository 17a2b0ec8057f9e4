"""`trimtab bench ddp`: where its ranks are."""

from __future__ import annotations

import pytest

from trimtab.bench.scenarios.ddp import CURVE, METHODS, _cluster
from trimtab.errors import TrimtabError


@pytest.mark.parametrize(
    ("hosts", "ranks", "per_host"),
    [(2, 2, [1, 1]), (1, 2, [2]), (2, 8, [4, 4]), (4, 8, [2, 2, 2, 2]), (3, 8, [3, 3, 2])],
)
def test_ranks_are_spread_evenly_over_the_hosts(hosts: int, ranks: int, per_host: list[int]) -> None:
    cluster = _cluster("1gbit", hosts, ranks, "cpu")
    assert cluster.world_size == ranks
    assert [sum(host.devices.values()) for host in cluster.hosts] == per_host
    assert bool(cluster.links) == (hosts > 1)


def test_parts_of_a_gpu_are_hosts_of_their_own() -> None:
    assert len(_cluster("1gbit", 2, 8, "cuda").hosts) == 8


def test_a_host_without_a_rank_is_refused() -> None:
    with pytest.raises(TrimtabError, match="2 ranks cannot be placed on 4 hosts"):
        _cluster("1gbit", 4, 2, "cpu")


def test_a_curve_has_its_floor_and_its_noise() -> None:
    assert set(CURVE) <= set(METHODS)
    assert {"ddp (again)", "ideal"} <= set(CURVE)
