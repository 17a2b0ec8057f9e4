"""The bench of hybrid accuracy: ranks compute what they would in a job, and the figures are read rightly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset, TensorDataset

from trimtab.bench.harness import AA
from trimtab.bench.scenarios.hybrid_accuracy import planned, rows, settings
from trimtab.bench.scenarios.hybrid_accuracy.methods import (
    CANARY,
    DBS,
    FP32,
    METHODS,
    PLAN,
    PLAN_INT8,
    TENSOR,
    UNIFORM,
    Pair,
    Way,
    four_bits,
    in_four_bits,
    lowerable,
    twin,
    ways,
)
from trimtab.models.tasks import Task

if TYPE_CHECKING:
    from tests.support.pool import Pool


def tiny_task(seed: int = 0) -> Task:
    """Two linear layers that learn which of four numbers is the largest."""
    torch.manual_seed(seed)
    inputs = torch.randn(512, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.argmax(1))
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 4))
    parts = Subset(data, range(400)), Subset(data, range(400, 512))
    return Task(model=settings.Classifier(net), train=parts[0], held_out=parts[1], samples=16)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("part", [0.5, 0.25])
def test_two_ranks_have_the_gradient_of_the_global_batch(part: float) -> None:
    task = tiny_task()
    pair = Pair(task, Way(precisions={}, part=part), 0)
    batch = pair.batch(0, 0)
    assert len(batch[0]) == 2 * task.samples
    pair.backward(batch)
    apart = gradients(task.model)
    task.model(*batch).backward()
    torch.testing.assert_close(apart, gradients(task.model))


def test_only_the_slow_rank_is_lowered_and_it_has_the_same_parameters() -> None:
    task = tiny_task()
    every = ways(task.model, {PLAN: {"net.0": "bf16"}, PLAN_INT8: {}}, 0.5)
    assert set(every) == set(METHODS)
    assert every[DBS].samples(48) == (32, 16)
    inputs = torch.randn(8, 4)
    exact = task.model.net(inputs)  # type: ignore[operator]
    for method in (PLAN, CANARY):
        pair = Pair(task, every[method], 0)
        torch.testing.assert_close(pair.fast.net(inputs), exact, rtol=0, atol=0)  # type: ignore[operator]
        error = (pair.slow.net(inputs) - exact).norm() / exact.norm()  # type: ignore[operator]
        assert 1e-4 < error < (0.02 if method == PLAN else 1)
        assert {id(p) for p in pair.slow.parameters()} == {id(p) for p in task.model.parameters()}


def test_the_canary_rounds_all_three_products() -> None:
    layer = nn.Linear(16, 8)
    x, g = torch.randn(4, 16, requires_grad=True), torch.randn(4, 8)
    low = in_four_bits(nn.ModuleDict({"layer": twin(layer)}), ["layer"])["layer"]  # type: ignore[index]
    low(x).backward(g)
    qx, qw, qg = four_bits(x.detach()), four_bits(layer.weight.detach()), four_bits(g)
    assert len(qw.unique()) <= 15
    torch.testing.assert_close(low(x), F.linear(qx, qw, layer.bias))
    torch.testing.assert_close(x.grad, qg @ qw)
    torch.testing.assert_close(layer.weight.grad, qg.t() @ qx)


def run(spec: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plan, time and train; the precisions that CPUs without fast bf16 would not be probed in are offered too."""
    with pytest.MonkeyPatch.context() as patch:
        tiny = settings.Setting(make=tiny_task, steps=6, lr=1e-2)
        patch.setitem(settings.SETTINGS, "tiny", tiny)
        patch.setattr(planned, "usual_precisions", lambda *_: ("bf16", "int8"))
        timed = planned.on_rank(spec, lambda done, total: None)
        plans = {"plans": {name: of_setting["plans"] for name, of_setting in timed.items()}}
        return timed, rows.on_rank({**spec, **plans}, lambda done, total: None)


def test_every_method_is_planned_timed_and_trained(ranks: Pool) -> None:
    spec = {"settings": ["tiny"], "speed": 0.5, "repeats": 2, "seeds": 2, "trained": 2}
    timed, trained = ranks(1, run, spec)[0]
    result = rows.result(timed, trained, 0.5)
    by_method = {row["method"]: row for row in result.rows}
    assert tuple(by_method) == METHODS
    for method, row in by_method.items():
        assert 0 < row["accuracy"] < 1
        assert (row["step_ms"] is None) == (method == CANARY)
        assert row["seeds"] == 2
    names = lowerable(tiny_task().model)
    assert by_method[UNIFORM]["operators_lowered"] == len(names) == 2
    assert by_method[PLAN]["operators_lowered"] <= 2
    # Nothing that is not lowered has an error, and fewer bits have a larger one.
    errors = {method: row["gradient_error"] for method, row in by_method.items()}
    assert errors[FP32] == 0
    assert errors[DBS] < 1e-5
    assert 0 < errors[UNIFORM] < errors[TENSOR] * 2 < errors[CANARY]
    assert errors[PLAN] <= errors[UNIFORM] * 1.1
    assert by_method[DBS]["gap_to_fp32"] == pytest.approx(0, abs=0.02)
    assert by_method[FP32 + AA]["loss_gap"] != 0


def test_gaps_are_compared_seed_by_seed_with_what_chance_does() -> None:
    """Seeds differ by 1, a method is worse by 0.1 in each: visible beside an A/A row that moves by 0.02."""
    seeds = [float(i) for i in range(4)]
    again = [value + sign * 0.02 for value, sign in zip(seeds, (1, -1, 1, -1), strict=True)]
    finals = {FP32: seeds, FP32 + AA: again, UNIFORM: [value + 0.1 for value in seeds]}
    every = rows.compared(finals)
    assert every[UNIFORM].gap == pytest.approx(0.1)
    assert every[UNIFORM].over_noise == pytest.approx(10)
    assert every[FP32] == (0, 0)
    assert abs(every[FP32 + AA].over_noise) < 1e-6


def row(**changes: Any) -> dict[str, Any]:
    same = {"gap_to_fp32": 0.0, "gap_over_noise": 0.0, "loss_gap": 0.0, "loss_gap_over_noise": 0.0}
    return {**same, "worse": False, "step_over_uniform": 1.0, "gradient_error": 0.1, **changes}


def test_what_the_plan_recovers_is_said_where_there_is_a_gap() -> None:
    every = {method: row() for method in METHODS}
    assert "plan recovers of uniform-low" not in rows.verdicts(every)
    every[UNIFORM] |= {"worse": True, "gap_to_fp32": 0.04, "gap_over_noise": 5.0}
    every[PLAN] |= {"gap_to_fp32": 0.01}
    assert rows.verdicts(every)["plan recovers of uniform-low"] == pytest.approx(0.75)
    every[UNIFORM] |= {"loss_gap": 0.2, "loss_gap_over_noise": 9.0}
    assert rows.verdicts(every)["plan recovers of uniform-low"] == pytest.approx(1.0)
