"""The bench of the predictor: its figures, and one small job end to end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from trimtab.bench.scenarios.predict import exchange, fsdp, ranks, tensor
from trimtab.bench.scenarios.predict.ddp import LINKS, MODELS, PLANS, HeldOutPlan, predict_jobs
from trimtab.bench.scenarios.predict.predict import KINDS, predict, regret, summary
from trimtab.bench.scenarios.predict.rows import row as row_of
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Sequence


def test_at_least_twelve_plans_of_three_models_are_held_out() -> None:
    assert len(MODELS["cpu"]) >= 3
    assert sum(len(PLANS[link]) for link in LINKS["cpu"]) * len(MODELS["cpu"]) >= 12
    for link in LINKS["cpu"]:
        assert {sum(plan.shares) for plan in PLANS[link]} == {ranks.UNITS}, (
            "unlike batches cannot be compared"
        )


@pytest.mark.parametrize("link", list(PLANS))
def test_no_plan_computes_what_was_probed(link: str) -> None:
    # Probed are steps in one precision throughout.
    assert not [p for p in PLANS[link] if p.shares[0] in ranks.PROBED and p.low in ("none", "all")]


def test_no_sharded_plan_has_probed_shares() -> None:
    assert {sum(plan.shares) for plan in fsdp.PLANS} == {ranks.UNITS}
    assert not [plan for plan in fsdp.PLANS if plan.shares[0] in ranks.PROBED]
    assert len(set(map(str, fsdp.PLANS))) == len(fsdp.PLANS)


def test_plans_of_other_exchanges_are_held_out_too() -> None:
    for plan in (*exchange.ROUTES, *exchange.ADAPTIVE, *exchange.ACCUMULATE):
        assert sum(plan.shares) == ranks.UNITS
        assert plan.shares[0] not in ranks.PROBED or plan.low not in ("none", "all"), str(plan)
    assert {plan.route for plan in exchange.ROUTES} == {"flat", "two levels"}
    assert str(exchange.ROUTES[1]) == "5/3, low none, 4 bits, two levels"
    assert str(exchange.ACCUMULATE[0]) == "4/4, low half, fp32 bits, 2 micro-batches"


def test_links_between_hosts_of_several_ranks_are_not_those_inside_them() -> None:
    parts_of_a_gpu = ranks.linked(ranks.two_hosts("cuda", "none", 2))
    assert {host.link for host in parts_of_a_gpu.hosts} == set(parts_of_a_gpu.links) == {"between"}
    alone, shaped = ranks.two_hosts("cuda", "none"), ranks.two_hosts("cpu", "300mbit", 2)
    assert (ranks.linked(alone), ranks.linked(shaped)) == (alone, shaped)


def test_no_tensor_plan_has_all_units_and_jobs_compare_equal_batches() -> None:
    for layouts in (tensor.TENSOR, tensor.DATA_X_TENSOR):
        assert all(max(layout.shares) < 1 for layout in layouts)
        assert all(sum(layout.shares) == 1 for layout in layouts)
        assert len({len(layout.samples) for layout in layouts}) == 1
        assert len({sum(layout.samples) for layout in layouts}) == 1, "regret compares equal work"


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["tensor", "data x tensor"])
def test_tensor_jobs_are_predicted_and_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"width": 64, "heads": 8, "layers": 1, "context": 16, "samples": 1}
    monkeypatch.setitem(tensor.LINKS, "cpu", ("none",))
    monkeypatch.setitem(tensor.SIZES, "cpu", small)
    rows = KINDS[kind]("cpu", 1, lambda done, total: None)
    assert len(rows) == 3
    assert all(row["predicted_ms"] > 0 < row["measured_ms"] for row in rows)


def test_a_round_is_compared_with_itself() -> None:
    # The machine is three times slower in the second half, and so are the probes.
    rounds = {
        "predicted": [1.1, 1.1, 3.3, 3.3],
        "naive": [0.5, 0.5, 1.5, 1.5],
        "measured": [1.0, 1.0, 3.0, 3.0],
        "again": [1.0, 1.0, 3.0, 3.0],
        "bottleneck": "the link",
    }
    row = row_of(HeldOutPlan((4, 4), "half", 4), rounds)
    assert row["error"] == pytest.approx(0.1)
    assert row["naive_error"] == pytest.approx(-0.5)
    assert row["repeat_error"] == 0
    assert row["plan"] == "4/4, low half, 4 bits"


def test_regret_is_what_the_choice_costs() -> None:
    rows = [
        {"predicted_ms": 10.0, "measured_ms": 12.0},
        {"predicted_ms": 11.0, "measured_ms": 10.0},
        {"predicted_ms": 20.0, "measured_ms": 30.0},
    ]
    assert regret(rows) == pytest.approx(0.2)
    assert regret(rows[1:]) == 0


def test_errors_count_without_their_sign() -> None:
    rows = [
        {
            "kind": k,
            "model": "a",
            "link": "x",
            "error": e,
            "naive_error": 0.3,
            "repeat_error": -0.02,
            "predicted_ms": 1.0,
            "measured_ms": 1.0,
        }
        for k, e in (("ddp", 0.1), ("route", -0.2))
    ]
    figures = summary(rows)
    assert figures["mean_error"] == pytest.approx(0.15)
    assert figures["max_error"] == pytest.approx(0.2)
    assert figures["repeat_error"] == pytest.approx(0.02)
    assert figures["regret"] == 0
    assert figures["mean_error (ddp)"] == figures["max_error (ddp)"] == pytest.approx(0.1)
    assert figures["mean_error (route)"] == pytest.approx(0.2)


def test_kinds_of_plans_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"predicted": [1.0], "measured": [1.0], "again": [1.0], "bottleneck": ""}
    one = {"model": "a", "link": "x", **row_of("a plan", seconds)}
    monkeypatch.setitem(KINDS, "ddp", lambda device, rounds, progress: [{**one, "rounds": rounds}])
    monkeypatch.setitem(KINDS, "elsewhere", lambda device, rounds, progress: [])
    result = predict("cpu", 3, ["ddp"], lambda done, total: None)
    assert [(row["kind"], row["rounds"]) for row in result.rows] == [("ddp", 3)]
    with pytest.raises(TrimtabError, match="no kind 'ring'"):
        predict("cpu", 3, ["ring"], lambda done, total: None)
    with pytest.raises(TrimtabError, match="--device cuda"):
        predict("cuda", 3, ["elsewhere"], lambda done, total: None)


def test_a_memory_error_has_its_sign() -> None:
    rounds = {"predicted": [1.0], "naive": [1.0], "measured": [1.0], "again": [1.0], "bottleneck": ""}
    row = row_of(HeldOutPlan((4, 4), "half", 4), {**rounds, "memory": [1.02, 0.9]})
    assert row["memory_error"] == pytest.approx(-0.1)
    rows = [
        {"kind": "ddp", "model": "a", "link": "x", **row, "memory_error": error} for error in (-0.1, 0.05)
    ]
    assert summary(rows)["memory_error"] == pytest.approx(0.1)


class _Job:
    """A job whose steps take what a plan says, and whose predictions are those of a made-up profile."""

    device = torch.device("cpu")
    workload = cluster = None

    def __init__(self, seconds: Sequence[float], drift: Sequence[float]) -> None:
        self.plans: list[Any] = list(seconds)
        self._drift, self._round = drift, -1

    def settle(self) -> None:
        pass

    def probe(self) -> list[float]:
        self._round += 1
        return [0.9 * self._drift[self._round], 1.1 * self._drift[self._round]]

    def measure(self, plan: float) -> float:
        return plan * self._drift[self._round]


def test_predictions_are_means_over_the_probed_steps_of_the_same_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def predict_step(profile: float, cluster: Any, plan: float, *, naive: bool = False) -> Any:
        return SimpleNamespace(step_s=profile * plan * (0.5 if naive else 1.2))

    monkeypatch.setattr(ranks, "Measured", lambda workload, profile: profile)
    monkeypatch.setattr(ranks, "predict_step", predict_step)
    monkeypatch.setattr(ranks, "bottleneck", lambda step: f"{step.step_s:.2f}")
    done: list[int] = []
    job: Any = _Job([2.0, 3.0], [1.0, 1.0, 4.0])
    of_plans = ranks._rounds(job, 3, done.append)
    assert done == [1, 2, 3]
    assert of_plans[0]["predicted"] == pytest.approx([2.4, 2.4, 9.6])
    assert of_plans[0]["measured"] == of_plans[0]["again"] == [2.0, 2.0, 8.0]
    rows = [row_of(plan, of_plan) for plan, of_plan in zip(PLANS["none"], of_plans, strict=False)]
    assert [row["error"] for row in rows] == pytest.approx([0.2, 0.2])
    assert [row["naive_error"] for row in rows] == pytest.approx([-0.5, -0.5])
    assert [row["measured_ms"] for row in rows] == pytest.approx([2000, 3000])


@pytest.mark.soak
def test_jobs_end_to_end() -> None:
    plans = [HeldOutPlan((1, 1), "half", 4), HeldOutPlan((1, 1), "none", None)]
    rows = predict_jobs("cpu", ["conv"], "none", plans, 1)
    assert [(row["model"], row["plan"]) for row in rows] == [("conv", str(plan)) for plan in plans]
    for row in rows:
        assert row["error"] == pytest.approx(row["predicted_ms"] / row["measured_ms"] - 1)
        assert 0 < row["predicted_ms"] < 10_000, "milliseconds of a step of a small network"
        assert set(row) == {
            "model",
            "link",
            "plan",
            "predicted_ms",
            "measured_ms",
            "error",
            "naive_error",
            "repeat_error",
            "bottleneck",
        }


@pytest.mark.soak
def test_sharded_jobs_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsdp.LINKS, "cpu", ("none",))
    rows = fsdp.fsdp_rows("cpu", 1, lambda done, total: None)
    assert [row["plan"] for row in rows] == [str(plan) for plan in fsdp.PLANS]
    for row in rows:
        assert row["error"] == pytest.approx(row["predicted_ms"] / row["measured_ms"] - 1)
        assert 0 < row["predicted_ms"] < 60_000
