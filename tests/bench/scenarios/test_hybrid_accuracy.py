"""The bench of hybrid accuracy: ranks compute what they would in a job, and the figures are read rightly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset, TensorDataset

from trimtab.bench.scenarios.hybrid_accuracy import planned, rows, settings
from trimtab.bench.scenarios.hybrid_accuracy.methods import (
    AGAIN,
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
    rounded_at_random,
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


def test_random_changes_are_of_the_size_of_bf16_and_push_nowhere() -> None:
    layer = nn.Linear(16, 16)
    x = torch.randn(1024, 16, requires_grad=True)
    exact, g = layer(x), torch.randn(1024, 16)
    (exact_gradient,) = torch.autograd.grad(exact, x, g)
    noisy = rounded_at_random(nn.ModuleDict({"layer": twin(layer)}), 0)["layer"]  # type: ignore[index]
    first, again = noisy(x), noisy(x)
    assert not first.equal(again)
    change = (first / exact - 1).detach()
    assert 0.9 / 512 < change.abs().max() < 1.001 / 512
    assert change.mean().abs() < 0.05 / 512
    (gradient,) = torch.autograd.grad(first, x, g)
    assert 1e-4 < (gradient - exact_gradient).norm() / exact_gradient.norm() < 1 / 512


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
        assert (row["step_ms"] is None) == (method in (CANARY, *AGAIN[1:]))
        assert row["seeds"] == 2
    names = lowerable(tiny_task().model)
    assert by_method[UNIFORM]["operators_lowered"] == len(names) == 2
    assert by_method[PLAN]["operators_lowered"] <= 2
    # Nothing that is not lowered has an error, and fewer bits have a larger one.
    errors = {method: row["gradient_error"] for method, row in by_method.items()}
    assert errors[FP32] == 0
    assert errors[DBS] < 1e-5
    assert all(0 < errors[again] < errors[UNIFORM] for again in AGAIN)
    assert 0 < errors[UNIFORM] < errors[TENSOR] * 2 < errors[CANARY]
    assert errors[PLAN] <= errors[UNIFORM] * 1.1
    assert by_method[DBS]["gap_to_fp32"] == pytest.approx(0, abs=0.02)
    assert len({by_method[method]["loss"] for method in (FP32, *AGAIN)}) == 1 + len(AGAIN)


def row(**changes: Any) -> dict[str, Any]:
    same = {"gap_to_fp32": 0.0, "loss_gap": 0.0, "loss_gap_low": -0.1, "loss_gap_high": 0.1}
    return {**same, "worse": False, "step_over_uniform": 1.0, "gradient_error": 0.1, **changes}


def test_what_the_plan_recovers_is_said_where_there_is_a_gap() -> None:
    every = {method: row() for method in METHODS}
    assert "plan recovers of uniform-low" not in rows.verdicts(every)
    every[UNIFORM] |= {"worse": True, "gap_to_fp32": 0.04}
    every[PLAN] |= {"gap_to_fp32": 0.01}
    assert rows.verdicts(every)["plan recovers of uniform-low"] == pytest.approx(0.75)
    every[UNIFORM] |= {"loss_gap": 0.2, "loss_gap_low": 0.1}
    assert rows.verdicts(every)["plan recovers of uniform-low"] == pytest.approx(1.0)
