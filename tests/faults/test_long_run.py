"""Thousands of steps of the default: replicas stay equal to the bit, and nothing grows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.faults.long_run import on_rank
from tests.support.requirements import requires

from trimtab.bench.ranks import hosts, run_on_cluster, two_hosts

pytestmark = requires(root=True, tools=["ip", "tc", "nsenter"])


def import_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks import this package."""
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize(
    "steps",
    [300, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
)
def test_nothing_grows_and_replicas_stay_equal(
    steps: int, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    import_tests(monkeypatch)
    outcomes = run_on_cluster(two_hosts(link="20mbit"), on_rank, {"steps": steps})  # slow enough to compress
    record_property("looks", [outcome["looks"] for outcome in outcomes])
    assert outcomes[0]["digest"] == outcomes[1]["digest"]
    for outcome in outcomes:
        first, last = outcome["looks"]
        print(first, last, outcome["changes"])
        assert last["memory"] <= first["memory"] + 8
        for what in ("threads", "descriptors", "groups"):
            assert last[what] == first[what], what
        assert "compress" in outcome["explained"]
        assert outcome["changes"] > 0, "no bits were chosen: this run tested nothing"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [2, 4])
def test_eight_ranks_on_emulated_hosts_stay_equal(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import_tests(monkeypatch)
    cluster = hosts((1.0,) * count, link="20mbit", per_host=8 // count)
    outcomes = run_on_cluster(cluster, on_rank, {"steps": 120})
    assert len(outcomes) == 8
    assert len({outcome["digest"] for outcome in outcomes}) == 1
    assert all(outcome["explained"].startswith("compressing") for outcome in outcomes), outcomes[0][
        "explained"
    ]
    assert all(outcome["changes"] > 0 for outcome in outcomes), "no bits were chosen: this run tested nothing"
