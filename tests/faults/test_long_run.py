"""Thousands of steps of the default: replicas stay equal to the bit, and nothing grows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.faults.long_run import on_rank
from tests.support.requirements import requires

from trimtab.bench.ranks import run_on_cluster, two_hosts

pytestmark = requires(root=True, tools=["ip", "tc", "nsenter"])


@pytest.mark.parametrize(
    "steps",
    [300, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])],
)
def test_nothing_grows_and_replicas_stay_equal(
    steps: int, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
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
