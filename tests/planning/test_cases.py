"""Which change is worth it: each is planned anew, and the words agree with the figures."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from tests.predict.profiles import FAST, SLOW, cluster, workload

from trimtab.cluster import Cluster
from trimtab.planning.cases import Case, changed_clusters, planned_case, verdicts
from trimtab.planning.cluster_changes import priced
from trimtab.planning.what_if import even, simulate


def test_each_change_is_made_by_itself_and_planned() -> None:
    changes = changed_clusters(cluster(), remove=["b"], add=["2xT4"], link_factor=10.0)
    base, alone, more, faster = [
        planned_case(name, one, workload(), {}, 3 * one.world_size) for name, one in changes
    ]
    assert [case.name for case in (base, alone, more, faster)] == [
        "as given, planned",
        "without b",
        "with 2xT4",
        "links 10 times as fast",
    ]
    assert (alone.cluster.world_size, more.cluster.world_size) == (1, 4)
    assert (base.batch_size, alone.batch_size, more.batch_size) == (6, 3, 12)
    assert more.row()["estimated"] == "T4"
    assert base.row()["estimated"] is None
    assert faster.step_s <= base.step_s
    assert base.plan is not None
    assert base.plan.shares == (4, 2)
    # Planned, a cluster is never slower than with even shares.
    assert base.step_s < simulate(cluster(), workload(), even(cluster(), 3)).timeline.step_s
    assert changed_clusters(cluster()) == []
    assert changed_clusters(cluster(), always=True) == [("as given, planned", cluster())]


def test_a_hundred_thousand_more_ranks_are_planned_in_seconds() -> None:
    ((_, base), (name, more)) = changed_clusters(cluster(), add=[f"100000x{FAST}"])
    start = time.process_time()
    case = planned_case(name, more, workload(), {}, 2 * more.world_size)
    assert time.process_time() - start < 60  # with work for each pair of ranks it is many minutes
    assert case.plan is not None
    assert case.plan.world_size == base.world_size + 100_000
    assert case.plan.role_of(case.plan.world_size - 1) in case.plan.roles


def case(name: str, samples_per_s: float, price: float | None) -> Case:
    one: Cluster = cluster()
    prices = {FAST: price / 2, SLOW: price / 2} if price is not None else {}
    devices = {name: replace(device, price_per_hour=None) for name, device in one.devices.items()}
    return Case(
        name=name,
        cluster=priced(replace(one, devices=devices), prices),
        batch_size=8,
        step_s=8 / samples_per_s,
    )


@pytest.mark.parametrize(
    ("samples_per_s", "price", "words"),
    [
        (200, 1.5, "2 times the samples/s, 2.083 for a million samples instead of 2.778: worth it"),
        (200, 3.0, "faster but dearer, 5.556 for a million of the samples that it adds"),
        (100, 0.5, "1 times the samples/s, 1.389 for a million samples instead of 2.778: worth it"),
        (100, 1.0, "it makes no difference"),
        (100, 2.0, "not worth it"),
        (50, 0.4, "cheaper but slower"),
        (50, 1.0, "not worth it"),
        (200, None, "2 times the samples/s, faster"),
        (100, None, "which gains nothing"),
    ],
)
def test_a_verdict_weighs_speed_and_cost(samples_per_s: float, price: float | None, words: str) -> None:
    (verdict,) = verdicts([case("as given", 100, 1.0), case("with X", samples_per_s, price)])
    assert verdict.startswith("with X: ")
    assert words in verdict


def test_a_budget_picks_the_fastest_within_it() -> None:
    cases = [case("as given", 100, 1.0), case("with X", 150, 2.0), case("with Y", 400, 9.0)]
    assert verdicts(cases, 2.0)[-1].startswith(
        "within 2 an hour the fastest is: with X (2 an hour, 150 samples/s)"
    )
    assert verdicts(cases, 0.5)[-1] == "none of these costs at most 0.5 an hour"
    unpriced = verdicts([*cases, case("with Z", 900, None)], 2.0)
    assert "not every device has a price in: with Z; give --price NAME=PRICE" in unpriced
    assert "with X" in unpriced[-1]
