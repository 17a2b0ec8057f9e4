"""Which hosts have slow links: rounds of pairs, classes of rates, and real ranks."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import pytest
import torch

from trimtab.measure.interfaces import classified, link_classes, rounds

if TYPE_CHECKING:
    from tests.support.pool import Pool


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_every_pair_meets_once(count: int) -> None:
    made = rounds(count)
    pairs = [tuple(sorted(pair)) for pairs in made for pair in pairs]
    assert sorted(pairs) == list(combinations(range(count), 2))
    for one in made:
        hosts = [host for pair in one for host in pair]
        assert len(hosts) == len(set(hosts)) >= count - count % 2


def test_rates_far_apart_are_classes_of_their_own() -> None:
    assert classified([100.0, 95.0, 60.0], "link") == (["link"] * 3, {"link": 1.0})
    names, slowness = classified([20.0, 100.0, 1.0, 90.0, 18.0], "link")
    assert names == ["link-2", "link", "link-3", "link", "link-2"]
    assert slowness == {"link": 1.0, "link-2": 5.0, "link-3": 100.0}


def measured(hosts: list[str]) -> tuple[list[str], dict[str, float]]:
    return link_classes(hosts, torch.device("cpu"), "link")


def test_all_ranks_find_the_same_classes(ranks: Pool) -> None:
    one, two = ranks(2, measured, ["a", "b"])
    assert one == two == (["link", "link"], {"link": 1.0}), "one pair of hosts has one rate"
    found = ranks(4, measured, ["a", "a", "b", "c"])
    names, slowness = found[0]
    assert all(own == found[0] for own in found)
    assert len(names) == 3
    assert set(names) == set(slowness)
    assert min(slowness.values()) == slowness["link"] == 1.0
