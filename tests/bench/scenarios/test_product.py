"""The bench of the whole product: its cluster, its methods, how losses become times, and its figures."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.control.plans.plan_cases import plan_for, role
from tests.support.requirements import requires
from torch import nn

from trimtab.bench.harness import AA, Timing
from trimtab.bench.ranks import hosts, run_on_cluster
from trimtab.bench.scenarios.product import (
    CANARY,
    IDEAL,
    METHODS,
    SMOOTHED,
    as_probed,
    cluster,
    figures,
    lose_on_rank,
    on_rank,
    predictions,
    rates,
    runs,
    steps_to,
    ways,
    with_losses,
)
from trimtab.planning.plan import Predicted

if TYPE_CHECKING:
    from trimtab.planning.plan import Plan

TINY = {
    "device": "cpu",
    "repeats": 1,
    "seeds": 2,
    "size": (64, 1, 16, 4),
    "warmup": 1,
    "block": 1,
    "steps": 8,
}


def plans(**precisions: str) -> tuple[Plan, Plan]:
    """With a fixed batch and with a free one, for four ranks in three roles."""
    shared = {name: role(name, samples, **precisions) for name, samples in zip("abc", (5, 4, 2), strict=True)}
    predicted = Predicted(
        step_s=1.0, plain_step_s=4.0, damage=0.0, uniform_damage=0.0, alone={"bits": 2.0, "shares": 3.0}
    )
    free = plan_for(
        nn.Linear(1, 1), roles=shared, ranks=(("a", 2), ("b", 1), ("c", 1)), bits=4, predicted=predicted
    )
    even = {name: replace(one, samples=4) for name, one in shared.items()}
    fixed = replace(
        free, batch="fixed", roles=even, bits=None, predicted=replace(predicted, step_s=3.5, alone={})
    )
    return fixed, free


def test_the_cluster_is_uneven_in_links_and_in_speeds() -> None:
    emulated = cluster("cpu")
    assert [rank.device for rank in emulated.ranks()] == ["a", "a", "b", "c"]
    rate = {host.name: emulated.links[host.link or ""].gbit_per_s for host in emulated.hosts}
    assert rate == {"a": 1.0, "b": 1.0, "c": 0.2}
    assert [device.speed for device in emulated.devices.values()] == [1.0, 0.7, 0.4]
    probed = as_probed(emulated)
    assert {host.link for host in probed.hosts} == {"link"}
    assert probed.links["link"].gbit_per_s == 0.2
    gpu = cluster("cuda")
    assert as_probed(gpu) == gpu
    assert [gpu.devices[rank.device].speed for rank in gpu.ranks()] == [1 / 2, 1 / 4, 1 / 6]


def test_every_method_changes_one_thing_but_the_plan() -> None:
    fixed, free = plans(first="int8")
    every = ways(as_probed(cluster("cpu")), fixed, free, 4)
    assert tuple(every) == METHODS
    assert every["ddp"] == every["ddp" + AA] == every["compress"]
    assert every["shares"].samples == (5, 5, 4, 2)
    assert not any(every["shares"].precisions)
    assert every["precision"].samples == (4, 4, 4, 4)
    assert every["precision"].precisions[3] == {"first": "int8"}
    assert every["joint"].samples == (5, 5, 4, 2)
    assert every["joint"].follows
    assert every[IDEAL].alone
    assert list(runs(every)) == ["ddp", "ddp" + AA, "compress", "precision", "joint", CANARY]
    nothing_lowered = ways(as_probed(cluster("cpu")), *plans(), 4)
    assert "precision" not in runs(nothing_lowered)


def test_predictions_stand_beside_what_they_predict() -> None:
    every = ways(as_probed(cluster("cpu")), *plans(), 4)
    timings = {method: Timing(samples=(0.25, 0.25)) for method in METHODS}
    shared: Any = type("Trained", (), {"data": type("Data", (), {"shares": (4,) * 4}), "wire_mb": 1.0})()
    trainers: Any = dict.fromkeys(METHODS, shared)
    rows = {row["method"]: row for row in rates(every, trainers, timings, predictions(*plans()), 16)}
    # Sixteen samples of a quarter of a second.
    expected = {"ddp": 4.0, "compress": 2.0, "shares": 3.0, "precision": 3.5, "joint": 1.0}
    for method, row in rows.items():
        step_s = expected.get(method)
        assert row["predicted_over_measured"] == (None if step_s is None else step_s / 4)
    assert rows["joint"]["samples_per_s"] == pytest.approx(4)
    assert rows["joint"]["fraction_of_ideal"] == 1


def test_the_time_to_a_loss_is_steps_at_the_measured_pace() -> None:
    falling = [[10.0 - step for step in range(10)] for _ in range(2)]
    late = [[10.0 - step / 2 for step in range(10)] for _ in range(2)]
    assert steps_to(falling, 10.0 - (SMOOTHED - 1) / 2) == SMOOTHED
    assert steps_to(falling, 0.0) is None
    finals = {"ddp": [3.0, 3.1], "ddp" + AA: [3.01, 3.12], "joint": [3.0, 3.11], CANARY: [6.0, 6.1]}
    curves = {"ddp": falling, "ddp" + AA: falling, "joint": falling, CANARY: late}
    speeds = {"ddp": 1.0, "ddp" + AA: 1.02, "compress": 3.0, "shares": 1.2, "precision": 1.0, "joint": 4.5}
    rows: list[dict[str, Any]] = [
        {"method": m, "samples_per_s": rate, "fraction_of_ideal": rate / 5, "predicted_over_measured": 1.0}
        for m, rate in {**speeds, IDEAL: 5.0}.items()
    ]
    completed = {row["method"]: row for row in with_losses(rows, {"finals": finals, "curves": curves}, 16)}
    assert completed["ddp"]["time_to_loss_s"] == pytest.approx(4.5 * completed["joint"]["time_to_loss_s"])
    assert completed["shares"]["final_loss"] == completed["ddp"]["final_loss"]
    assert completed[CANARY]["time_to_loss_s"] is None
    assert "final_loss" not in completed[IDEAL]
    summary = figures(list(completed.values()))
    assert summary["joint_over_ddp"] == 4.5
    assert summary["best_single"] == "compress"
    assert summary["joint_over_best_single"] == 1.5
    assert summary["canary_flagged"]
    assert not summary["joint_worse"]


@pytest.mark.soak
@requires(root=True, tools=("tc",))
def test_from_probing_to_losses_on_emulated_hosts() -> None:
    measured = run_on_cluster(cluster("cpu"), on_rank, TINY)
    trained = run_on_cluster(hosts((1.0,) * 4), lose_on_rank, {**TINY, "runs": measured["runs"]})
    rows = with_losses(measured["rows"], trained, measured["batch_size"])
    assert [row["method"] for row in rows] == [*METHODS, CANARY]
    by_method = {row["method"]: row for row in rows}
    for method in METHODS:
        assert by_method[method]["samples_per_s"] > 0
    assert by_method[IDEAL]["fraction_of_ideal"] == 1
    assert by_method["joint"]["predicted_over_measured"] > 0
    assert figures(rows)["canary_flagged"]
