"""Profiles inside cluster files: read back equal, merged, and refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.predict.profiles import FAST, SLOW, cluster, device_profile, profile, workload

from trimtab.cluster import check_profile, load_cluster, merge_profiles, save_cluster
from trimtab.errors import TrimtabError
from trimtab.predict.operators.costs import workload_key

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_cluster_with_its_profile_is_read_back_equal(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"cluster.{suffix}"
    save_cluster(cluster(), path)
    assert load_cluster(path) == cluster()


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("version",), 1, "profile: version mismatch: found 1, expected 3.*trimtab probe"),
        (("devices", FAST, "optimiser", "a"), -1.0, "profile.devices.fast.optimiser.a"),
        (("devices", FAST, "surprise"), 1, "profile.devices.fast.surprise: unknown key"),
        (
            ("devices", FAST, "batches", "Net"),
            [2, 2],
            r"fast.batches.Net: batch sizes \[2, 2\] must be in ascending",
        ),
        (("devices", FAST, "optimiser", "a"), 1e300, "optimiser.a: should be less than or equal to"),
        (("links", "lan", "all_reduce", "per_byte_s"), "fast", "per_byte_s"),
    ],
)
def test_a_damaged_profile_is_refused_by_place(
    tmp_path: Path, place: tuple[str, ...], value: object, words: str
) -> None:
    path = tmp_path / "cluster.json"
    save_cluster(cluster(), path)
    tree = json.loads(path.read_text())
    inner = tree["profile"]
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(tree))
    with pytest.raises(TrimtabError, match=words):
        load_cluster(path)


def test_another_version_is_refused_by_name() -> None:
    old = replace(profile(), trimtab="0.0.1")
    with pytest.raises(TrimtabError, match=r"measured with trimtab 0\.0\.1, and this is trimtab 9"):
        check_profile(old, trimtab="9")
    with pytest.raises(TrimtabError, match="measured with torch"):
        check_profile(profile(), trimtab=profile().trimtab, torch="1.0")
    with pytest.raises(TrimtabError, match="measured with trimtab"):
        merge_profiles([profile(), old])


def test_profiles_of_several_hosts_merge() -> None:
    one = replace(profile(), devices={FAST: device_profile()}, links={})
    two = replace(profile(), devices={SLOW: device_profile(2.0)})
    both = merge_profiles([one, two])
    assert set(both.devices) == {FAST, SLOW}
    assert both.links == two.links


def test_an_estimate_never_replaces_a_measurement() -> None:
    guess = replace(device_profile(9.0), estimated_from="x")
    measured = replace(profile(), devices={FAST: device_profile()})
    guessed = replace(profile(), devices={FAST: guess})
    for order in ([measured, guessed], [guessed, measured]):
        assert merge_profiles(order).devices[FAST] == device_profile()


def test_unlike_devices_do_not_merge_under_one_name() -> None:
    other = replace(profile(), devices={FAST: device_profile(called="another")})
    with pytest.raises(TrimtabError, match="'fast' is 'device' in one profile and 'another'"):
        merge_profiles([profile(), other])


def test_batches_of_both_are_kept() -> None:
    key = workload_key(workload())
    more = replace(device_profile(), batches={key: (4,), "Other": (1,)})
    both = merge_profiles([replace(profile(), devices={FAST: d}) for d in (device_profile(), more)])
    assert both.devices[FAST].batches == {key: (2, 4, 6), "Other": (1,)}
