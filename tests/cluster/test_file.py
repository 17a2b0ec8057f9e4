"""Cluster files: one strict form; every other file is refused with its name, the place and the remedy."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trimtab.cluster import Cluster, Device, Host, Link, load_cluster, parse_cluster, save_cluster
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """
version: 1
devices:
  fast: {kind: cpu, speed: 1.0, memory_gib: 4, price_per_hour: 0.5}
  slow: {kind: cpu, speed: 0.4}
links:
  office: {gbit_per_s: 1, latency_us: 100}
hosts:
  - {name: a, devices: {fast: 2, slow: 1}, link: office}
  - {name: b, devices: {slow: 1}, count: 2}
"""


def test_a_good_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(GOOD)
    cluster = load_cluster(path)
    assert cluster.world_size == 5
    assert [name for name, _ in cluster.machines()] == ["a", "b-0", "b-1"]
    assert [(r.rank, r.host, r.local_rank, r.device) for r in cluster.ranks()] == [
        (0, "a", 0, "fast"),
        (1, "a", 1, "fast"),
        (2, "a", 2, "slow"),
        (3, "b-0", 0, "slow"),
        (4, "b-1", 0, "slow"),
    ]


def test_a_cluster_cannot_be_changed() -> None:
    cluster = parse_cluster(GOOD, source="here")
    with pytest.raises(dataclasses.FrozenInstanceError):
        cluster.version = 2  # type: ignore[misc]


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,10}", fullmatch=True)
amounts = st.floats(1e-3, 1e3)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    devices = draw(
        st.dictionaries(
            names,
            st.builds(
                Device,
                kind=st.sampled_from(["cpu", "cuda"]),
                speed=amounts,
                memory_gib=st.none() | amounts,
                model=st.none() | st.text(max_size=8),
                price_per_hour=st.none() | amounts,
            ),
            min_size=1,
            max_size=3,
        )
    )
    links = draw(
        st.dictionaries(
            names, st.builds(Link, gbit_per_s=amounts, latency_us=st.none() | amounts), max_size=2
        )
    )
    hosts = tuple(
        Host(
            name=f"h{index}",
            devices=draw(st.dictionaries(st.sampled_from(sorted(devices)), st.integers(1, 9), min_size=1)),
            link=draw(st.none() | st.sampled_from(sorted(links))) if links else None,
            count=draw(st.integers(1, 1000)),
        )
        for index in range(draw(st.integers(1, 3)))
    )
    return Cluster(version=1, devices=devices, links=links, hosts=hosts)


@given(clusters(), st.sampled_from(["c.yaml", "c.yml", "c.json"]))
def test_what_is_written_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, cluster: Cluster, name: str
) -> None:
    path = tmp_path_factory.mktemp("clusters") / name
    save_cluster(cluster, path)
    assert load_cluster(path) == cluster


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("speed: 0.4", "speed: 0", "devices.slow.speed: should be greater than 0, not 0"),
        ("speed: 0.4", "speed: -1", "devices.slow.speed: should be greater than 0, not -1"),
        ("speed: 0.4", "speed: .nan", "devices.slow.speed: should be a finite number, not nan"),
        ("speed: 0.4", "speed: .inf", "devices.slow.speed: should be"),
        ("speed: 0.4", "speed: '0.4'", "devices.slow.speed: should be a valid number, not '0.4'"),
        ("speed: 0.4", "speed: true", "devices.slow.speed: should be a valid number, not True"),
        ("speed: 0.4", "sped: 0.4", "devices.slow.sped: unknown key"),
        ("{kind: cpu, speed: 0.4}", "{kind: cpu}", "devices.slow.speed: missing"),
        ("kind: cpu, speed: 0.4", "kind: tpu, speed: 0.4", "devices.slow.kind: should be 'cpu' or 'cuda'"),
        ("memory_gib: 4", "memory_gib: -4", "devices.fast.memory_gib: should be greater than 0"),
        ("gbit_per_s: 1,", "gbit_per_s: 0,", "links.office.gbit_per_s: should be greater than 0"),
        (
            "latency_us: 100",
            "latency_us: -1",
            "links.office.latency_us: should be greater than or equal to 0",
        ),
        ("version: 1", "version: 2", "version mismatch: found 2, expected 1"),
        ("version: 1", "version: '1'", "version: should be a valid integer"),
        ("version: 1", "", "version: missing"),
        ("link: office", "link: home", "hosts[0] (a): no link class 'home'; there are office"),
        ("{slow: 1}, count", "{slo: 1}, count", "hosts[1] (b): no device class 'slo'; there are fast, slow"),
        ("name: b", "name: a", "already a host called"),
        ("name: b", "name: '../b'", "hosts[1].name: '../b' is not a valid name"),
        ("count: 2", "count: 0", "hosts[1].count: should be greater than or equal to 1"),
        ("count: 2", "count: 99999999", "hosts[1].count: should be less than or equal to"),
        ("{slow: 1}, count", "{}, count", "hosts[1].devices"),
        ("hosts:", "hosts: []\nmore:", "hosts"),
        ("version: 1", "version: 1\nversion: 1", "key 'version' appears twice"),
    ],
)
def test_a_wrong_file_is_refused_with_place_and_remedy(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    assert old in GOOD
    path = tmp_path / "c.yaml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(TrimtabError) as refusal:
        load_cluster(path)
    assert str(path) in str(refusal.value)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "just words",
        "a: [1, 2",
        "\x00\x01",
        "!!python/object/apply:os.system ['true']",
        "a: &x [1]\nb: [*x, *x]",
        "x: " + "[" * 3000,
        "? [1]\n: 2",
        "version: 1\ndevices: 5\nhosts: 7",
        "version: 1e400\ndevices: {}\nhosts: []",
    ],
)
def test_a_hostile_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(TrimtabError, match=r"c\.yaml: "):
        load_cluster(path)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    for name in ("c.yaml", "c.json"):
        path = tmp_path_factory.mktemp("clusters") / name
        path.write_bytes(content)
        with pytest.raises(TrimtabError):
            load_cluster(path)


def test_json_is_as_strict() -> None:
    tree = json.dumps(yaml.safe_load(GOOD))
    assert parse_cluster(tree, source="x", form="json") == parse_cluster(GOOD, source="x")
    with pytest.raises(TrimtabError, match="appears twice"):
        parse_cluster('{"version": 1, "version": 1}', source="x", form="json")
    with pytest.raises(TrimtabError, match="speed"):
        parse_cluster(tree.replace("0.4", "NaN"), source="x", form="json")


def test_files_that_are_not_there_or_not_clusters(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="cannot be read: No such file"):
        load_cluster(tmp_path / "none.yaml")
    with pytest.raises(TrimtabError, match=r"ends in \.yaml, \.yml or \.json"):
        load_cluster(tmp_path / "cluster.txt")
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (33 << 20))
    with pytest.raises(TrimtabError, match="larger than 32 MiB"):
        load_cluster(large)
    (tmp_path / "d.yaml").mkdir()
    with pytest.raises(TrimtabError, match="cannot be read: Is a directory"):
        load_cluster(tmp_path / "d.yaml")
