"""The planner at scale: what its bench reports, on a cluster that is small enough for a test."""

from __future__ import annotations

import pytest

from trimtab.bench.scenarios.scale import cluster, model, scale
from trimtab.errors import TrimtabError
from trimtab.planning.what_if import even, what_ifs
from trimtab.predict.collectives import Placement
from trimtab.predict.step import rank_counts


def test_two_hundred_ranks_in_eight_classes() -> None:
    result = scale([200], 8, 1, [10.0, 100.0], lambda done, total: None)
    slow, fast = result.rows
    for row in result.rows:
        assert row.keys() >= {"plan_s", "simulate_s", "mib", "predicted_over_ddp", "reason"}
        assert (row["ranks"], row["classes"], row["layers"]) == (200, 8, 1)
        assert row["predicted_over_ddp"] <= 1
    assert slow["predicted_over_ddp"] < 0.7
    assert slow["bits"] is not None
    assert "times as fast" in slow["reason"]
    assert fast["predicted_over_ddp"] > slow["predicted_over_ddp"], "there is less to gain on a faster link"


def test_a_cluster_of_ten_thousand_ranks_is_described_by_its_classes() -> None:
    workload = model(1)
    big = cluster(workload, 10_000, 40, 10.0)
    assert big.world_size == 10_000
    assert len(rank_counts(big)) == 40
    assert len(Placement.on(big).classes) == 4
    plain, packed = what_ifs(big, workload, even(big, 4), bits=4)
    assert packed.setting.route is not None
    assert packed.setting.route.method == "halving"
    assert packed.timeline.step_s < plain.timeline.step_s
    assert "in 4 bits" in plain.words()


def test_what_is_no_list_of_numbers_is_refused() -> None:
    with pytest.raises(TrimtabError, match="world sizes as 1000,10000"):
        scale([], 8, 1, [10.0], lambda done, total: None)
