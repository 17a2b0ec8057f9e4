"""Finding hosts, measuring between them, and what is chosen for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from tests.support.faults import Throttle

from trimtab.codec import Block
from trimtab.control.compression.host_route import choose_host_route

if TYPE_CHECKING:
    from tests.support.pool import Pool


def chosen(agents: list[str]) -> tuple[bool, str | None, str]:
    assert dist.group.WORLD is not None
    os.environ["GROUP_RANK"] = agents[dist.get_rank()]
    try:
        route = choose_host_route(dist.group.WORLD, torch.device("cpu"), Block(), 25_000_000)
    finally:
        del os.environ["GROUP_RANK"]
    dist.barrier()
    if route.hierarchy is not None:
        route.hierarchy.close()
    return route.hierarchy is not None, route.method, route.reason


def test_a_slow_link_between_hosts_of_several_ranks_is_found_and_spared(ranks: Pool) -> None:
    # Groups made from the default one are as slow; shared memory is not.
    answers = ranks(4, chosen, ["0", "0", "1", "1"], faults=[Throttle(4e6)], allow_groups=True)
    hierarchical, method, reason = answers[0]
    assert answers == [answers[0]] * 4, "measured figures are agreed on"
    assert hierarchical
    assert method == "all_gather"
    assert "2 hosts of 2 ranks" in reason


def test_unequal_hosts_are_measured_too(ranks: Pool) -> None:
    answers = ranks(3, chosen, ["0", "0", "1"], allow_groups=True)
    assert answers == [answers[0]] * 3, "also on the rank that owns no shard"
    assert "2 hosts of 1 to 2 ranks" in answers[0][2]


def test_where_there_is_no_second_level_the_reason_is_given(ranks: Pool) -> None:
    assert all("one rank" in reason for _, _, reason in ranks(2, chosen, ["0", "1"]))
