"""The cluster of a run: what its ranks wrote, in the form of a cluster file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.report.run_cases import STARTED, sample, start, two_ranks, write_rank

from trimtab.cluster import cluster_tree
from trimtab.report.known_cluster import known_cluster
from trimtab.report.run_folder import load_run

if TYPE_CHECKING:
    from pathlib import Path

COMPRESS = {
    "time": STARTED,
    "kind": "decision",
    "step": 0,
    "what": "compress",
    "expected": {"gbit_per_s": 0.91234},
}


def device(name: str, gib: int) -> dict[str, Any]:
    return {
        "time": STARTED,
        "kind": "device",
        "step": 0,
        "device": "cuda:0",
        "name": name,
        "memory_limit": gib << 30,
    }


def test_hosts_devices_memory_speed_and_the_measured_link(tmp_path: Path) -> None:
    for rank, (host, name, gib) in enumerate(
        (("a", "RTX 4090", 24), ("a", "RTX 4090", 24), ("b.lan", "T4", 16))
    ):
        steps = [sample(step, 0 if rank < 2 else 1) for step in range(1, 5)]
        more = [COMPRESS] if rank == 0 else []
        write_rank(tmp_path, rank, [start(rank, host, 3), device(name, gib), *more, *steps])
    cluster = known_cluster(load_run(tmp_path))
    assert cluster is not None
    assert [(host.name, host.devices, host.link) for host in cluster.hosts] == [
        ("a", {"RTX-4090": 2}, "measured"),
        ("b-lan", {"T4": 1}, "measured"),
    ]
    assert cluster.links["measured"].gbit_per_s == 0.9123
    assert cluster.devices["RTX-4090"].speed == 1.0
    assert cluster.devices["T4"].speed == pytest.approx((24 / 0.09) / (32 / 0.06), abs=1e-3)
    assert [each.memory_gib for each in cluster.devices.values()] == [24, 16]
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "cluster": cluster_tree(cluster)}))
    for rank in range(3):
        (tmp_path / f"rank-{rank}.jsonl").write_text("")
    assert known_cluster(load_run(tmp_path)) == cluster, "as run.json holds it"


def test_one_host_has_no_link(tmp_path: Path) -> None:
    folder = two_ranks(tmp_path, COMPRESS)
    assert known_cluster(load_run(folder)) is None, "no rank said what it runs on"
    for rank in range(2):
        write_rank(folder, rank, [start(rank), device("T4", 16), COMPRESS])
    cluster = known_cluster(load_run(folder))
    assert cluster is not None
    assert (cluster.links, cluster.world_size, cluster.devices["T4"].speed) == ({}, 2, 1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "<script>"},
        {"name": 10**300},
        {"name": "", "device": "::"},
        {"memory_limit": -1},
        {"memory_limit": 1e299},
    ],
)
def test_hostile_values_give_some_cluster_or_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    hostile = {**device("T4", 16), **changes}
    write_rank(tmp_path, 0, [start(0, "-" * 99, 1), hostile, sample(1, samples=1e299, compute=1e-300)])
    known_cluster(load_run(tmp_path))
    (tmp_path / "run.json").write_text(
        json.dumps({"version": 1, "cluster": {"version": 1, "hosts": hostile}})
    )
    assert known_cluster(load_run(tmp_path)) is None
