"""Clusters with more or fewer devices, other links and prices; every mistake by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.predict.profiles import FAST, SLOW, cluster, profile

from trimtab.cluster import Host
from trimtab.errors import TrimtabError
from trimtab.planning.cluster_changes import (
    added,
    changed,
    faster_links,
    parsed_prices,
    priced,
    require_one_kind,
    require_priced,
    with_link,
    without,
)


def test_a_rank_is_taken_from_the_right_host() -> None:
    many = replace(
        cluster(), hosts=(Host(name="a", devices={FAST: 2, SLOW: 1}, link="lan", count=2), cluster().hosts[1])
    )
    less = without(many, SLOW)
    assert less.world_size == many.world_size - 1
    assert sum(rank.device == SLOW for rank in less.ranks()) == 2
    assert without(many, "b").hosts == many.hosts[:1]
    with pytest.raises(TrimtabError, match="no host or device class 'c'; there are a, b, fast, slow"):
        without(many, "c")
    with pytest.raises(TrimtabError, match="cluster is empty"):
        without(replace(cluster(), hosts=cluster().hosts[:1]), "a")


def test_what_is_added_is_known() -> None:
    assert added(cluster(), f"3x{FAST}").world_size == 5
    card = added(cluster(), "A100")
    assert card.devices["A100"].memory_gib == 40
    assert card.hosts[-1].link == "lan"
    for text, words in (
        ("2xWarp", r"neither a device class of the cluster .fast, slow. nor in the catalog .V100.*RTX 3090"),
        ("two T4", "write 2xT4"),
        ("0xT4", "write 2xT4"),
        ("T4;", "write 2xT4"),
        (f"1000001x{FAST}", "up to a million"),
    ):
        with pytest.raises(TrimtabError, match=words):
            added(cluster(), text)


def test_the_same_change_is_made_as_often_as_it_is_asked_for() -> None:
    long = "a-device-class-of-32-letters-ab"
    devices = {long: cluster().devices[FAST], **cluster().devices}
    rack = Host(name="a-rack-with-a-name-of-32-letters", devices={SLOW: 2}, link="lan", count=4)
    many = replace(cluster(), devices=devices, hosts=(*cluster().hosts, rack))
    grown = changed(many, add=[long] * 4 + [f"2x{FAST}"] * 15)
    assert grown.world_size == many.world_size + 34
    less = changed(many, remove=[rack.name] * 3)
    assert less.world_size == many.world_size - 3
    assert [sum(host.devices.values()) * host.count for host in less.hosts[2:]] == [1, 1, 1, 2]


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf"), 1e300, 1e-300])
def test_links_cannot_be_slower_than_nothing(factor: float) -> None:
    with pytest.raises(
        TrimtabError, match=f"cannot be {factor:g} times as fast; give --link-factor 1e-09".replace("+", ".")
    ):
        faster_links(cluster(), factor)


def test_a_rate_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(TrimtabError, match="is not a link rate"):
        with_link(cluster(), "9" * 400 + "gbit")


@pytest.mark.parametrize(
    "text", ["RTX 3090", "rtx3090", "RTX-3090", "rtx_3090", "3xrtx 3090", "2 x NVIDIA GeForce RTX 3090"]
)
def test_a_card_is_found_as_people_write_it(text: str) -> None:
    grown = added(cluster(), text)
    (name,) = grown.hosts[-1].devices
    assert grown.devices[name].model == "RTX 3090"
    assert grown.world_size - cluster().world_size == int(text[0]) if text[0].isdigit() else 1


def test_one_job_has_one_kind_of_device() -> None:
    require_one_kind(added(cluster(), FAST))
    with pytest.raises(
        TrimtabError, match=rf"cpu \({FAST}, {SLOW}\) and cuda \(T4\), and one job cannot use both"
    ):
        require_one_kind(added(cluster(), "T4"))


def test_faster_links_leave_the_exchange_inside_hosts_as_it_is() -> None:
    known = profile()
    inside = replace(known, links={**known.links, "local": known.links["lan"]})
    faster = faster_links(replace(cluster(), profile=inside), 2.0).profile
    assert faster is not None
    assert faster.links["local"] == known.links["lan"]
    before, after = known.links["lan"]["all_reduce"], faster.links["lan"]["all_reduce"]
    assert after.per_byte_s == pytest.approx(before.per_byte_s / 2)


def test_the_same_card_is_added_twice() -> None:
    assert changed(cluster(), add=["T4", "2xT4"], remove=["b"]).world_size == 4


def test_hosts_without_a_link_get_one() -> None:
    alone = replace(cluster(link=None), links={})
    assert {host.link for host in with_link(alone, "1gbit").hosts} == {"1gbit"}
    assert with_link(alone, "200 Mbit/s").links["200-mbit-s"].gbit_per_s == pytest.approx(0.2)
    with pytest.raises(TrimtabError, match="has a link already; change its rate with --link-factor"):
        with_link(cluster(), "1gbit")
    for text in ("fast", "0gbit", "1", "1 gbyte"):
        with pytest.raises(TrimtabError, match="write it as 1gbit or 100mbit"):
            with_link(alone, text)


def test_prices_go_to_classes_and_cards() -> None:
    grown = added(added(cluster(), "rtx3090"), "T4")
    with_prices = priced(grown, parsed_prices(["RTX 3090=0.4", f"{FAST}=2"])).devices
    assert {name: device.price_per_hour for name, device in with_prices.items()} == {
        FAST: 2.0,
        SLOW: 0.5,
        "rtx3090": 0.4,
        "T4": None,
    }
    for text in ("T4", "=1", "T4=-1", "T4=much", "T4=nan"):
        with pytest.raises(TrimtabError, match=r"T4=0\.35"):
            parsed_prices([text])


def test_a_price_of_no_device_is_refused() -> None:
    clusters = [cluster(), added(cluster(), "RTX 3090")]
    require_priced(clusters, {FAST: 1.0, "rtx3090": 0.4})
    with pytest.raises(
        TrimtabError, match="--price T4: there is no such device; there are fast, slow, RTX-3090"
    ):
        require_priced(clusters, {"T4": 0.35})
