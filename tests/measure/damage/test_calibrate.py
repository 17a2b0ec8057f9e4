"""Damage that follows a model while it trains, and what a calibration is made of."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.measure.damage.test_indicators import loss, make
from tests.measure.damage.test_recorder import Twice, hooks, ids
from tests.support.requirements import requires
from torch import nn

from trimtab.api.set_precision import set_precision
from trimtab.errors import TrimtabError
from trimtab.measure.damage.calibrate import Refresh, calibrate
from trimtab.measure.damage.dry_run import DryRun
from trimtab.measure.damage.indicators import gradient_damage


def test_it_starts_with_the_damage_of_the_batches() -> None:
    model, batches = make()
    refresh = Refresh(model, batches, loss, precisions=["bf16", "int8"])
    assert refresh.damage == gradient_damage(model, batches, loss, precisions=["bf16", "int8"])


def test_a_step_that_is_looked_at_moves_it_and_others_cost_nothing() -> None:
    model, batches = make()
    refresh = Refresh(model, batches, loss, precisions=["bf16", "int8"], memory=0.5)
    before = refresh.damage
    error = {precision: sources["w"].error for precision, sources in refresh.sources["up"].items()}
    loss(model(*batches[0])).backward()
    assert refresh.damage == before
    assert hooks(model) == 0
    # One weight of each row far above the others makes int8's steps there coarse, and hardly touches bf16.
    with torch.no_grad():
        model.up.weight[:, 0] = 8 * model.up.weight.abs().max()
    plain = torch.autograd.grad(_deterministic(model, batches[0][0]), list(model.parameters()))
    model.zero_grad()
    with refresh.step():
        _deterministic(model, batches[0][0]).backward()
    assert hooks(model) == 0
    for parameter, grad in zip(model.parameters(), plain, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, grad)  # looking changes nothing
    after = refresh.damage
    assert refresh.sources["up"]["int8"]["w"].error > 2 * error["int8"]
    assert refresh.sources["up"]["bf16"]["w"].error < 1.5 * error["bf16"]
    assert after["up"]["int8"] > before["up"]["int8"]
    assert after["conv1"]["int8"] == pytest.approx(before["conv1"]["int8"], rel=0.5)


def _deterministic(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)
    return loss(model(x))


def test_it_forgets_slowly() -> None:
    model, batches = make()
    quick, slow = (Refresh(model, batches, loss, precisions=["int8"], memory=memory) for memory in (0.0, 0.9))
    start = quick.damage["conv1"]["int8"]
    far = batches[0][0] ** 5  # a few large values among small ones
    for refresh in (quick, slow):
        for _ in range(2):
            with refresh.step():
                _deterministic(model, far).backward()
    moved, crept = (abs(refresh.damage["conv1"]["int8"] - start) for refresh in (quick, slow))
    assert 0 < crept < 0.3 * moved


@requires(int8=True)
def test_operators_that_are_lowered_already_are_followed_too() -> None:
    torch.manual_seed(0)
    model = Twice()
    refresh = Refresh(model, [(ids(),)], precisions=["bf16", "int8"], memory=0.0)
    before = refresh.damage
    set_precision(model, {"shared": "bf16", "mix/attention": "bf16", "head": "int8"})
    with refresh.step():
        model(ids()).backward()
    for name, by in refresh.damage.items():
        for precision, value in by.items():
            assert value == pytest.approx(before[name][precision], rel=0.5), (name, precision)


def test_a_step_that_is_not_finite_is_passed_over() -> None:
    model, batches = make()
    refresh = Refresh(model, batches, loss, precisions=["bf16", "int8"], memory=0.0)
    before = refresh.damage
    with refresh.step():
        loss(model(batches[0][0] * torch.nan)).backward()
    assert refresh.damage == before
    with pytest.raises(KeyError), refresh.step():
        raise KeyError
    assert hooks(model) == 0
    assert refresh.damage == before


def test_a_memory_that_is_no_weight_is_refused() -> None:
    model, batches = make()
    with pytest.raises(TrimtabError, match="memory must be at least 0 and less than 1; got 1"):
        Refresh(model, batches, loss, precisions=["int8"], memory=1.0)


def test_sources_follow_what_the_operators_round() -> None:
    model, batches = make()
    with DryRun(model, batches, loss, 0) as dry_run:
        sources = calibrate(dry_run, ["bf16", "int8", "fp32"])
    # The first layer's input has no gradient, one layer has no bias; int8 rounds the gradient for each product.
    assert set(sources["conv1"]["int8"]) == {"x", "w", "gy for w"}
    assert set(sources["conv2"]["int8"]) == {"x", "w", "gy for x", "gy for w"}
    assert set(sources["conv2"]["bf16"]) == {"x", "w", "y", "gx", "gw", "gy"}
    assert set(sources["up"]["bf16"]) == {"x", "w", "b", "y", "gx", "gw", "gy"}
    assert set(sources["up"]) == {"bf16", "int8"}
    for by in sources.values():
        for source in by["bf16"].values():
            assert 0 < source.error < 2.0**-16  # half of the last of 8 bits, squared
            assert math.isfinite(source.gain)
            assert source.gain > 0


def test_gains_are_exact_where_the_loss_is_quadratic() -> None:
    # y = w x, loss = ½ Σ y²: the gradient is w x xᵀ, and an error e of w changes it by e x xᵀ.
    torch.manual_seed(0)
    model = nn.Linear(8, 64, bias=False)
    x = torch.randn(16, 8)
    with DryRun(model, [(x,)], lambda y: 0.5 * y.square().sum(), 0) as dry_run:
        found = calibrate(dry_run, ["int8"], probes=8)[""]["int8"]["w"]
    w = model.weight.detach()
    outer = x.t() @ x
    # Every element has about the same error here; what it does is the mean of ‖row of x xᵀ‖².
    expected = w.square().sum() * outer.square().sum() / 8 / (w @ outer).square().sum()
    assert found.gain == pytest.approx(float(expected), rel=0.15)


@requires(int8=True)
def test_corners_of_relu_do_not_upset_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    x = torch.randn(256, 16)
    target = x[:, :4].square()
    found, truth = (
        gradient_damage(
            model, [(x,)], lambda y: F.mse_loss(y, target), precisions=["int8"], indicator=indicator
        )
        for indicator in ("variance", "measured")
    )
    for name in found:
        assert 0.3 < found[name]["int8"] / truth[name]["int8"] < 3, name


def test_a_large_model_is_recorded_in_several_passes_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4))
    model[1].requires_grad_(False)
    batches = [torch.randn(256, 16) for _ in range(2)]

    def sources() -> Any:
        passes.append(0)
        with DryRun(model, batches, lambda y: y.square().sum(), 0) as dry_run:
            return calibrate(dry_run, ("bf16", "int8"))

    passes: list[int] = []
    gradient = DryRun.gradient

    def counted(*arguments: Any, **options: Any) -> Any:
        passes[-1] += 1
        return gradient(*arguments, **options)

    monkeypatch.setattr(DryRun, "gradient", counted)
    at_once = sources()
    monkeypatch.setattr("trimtab.measure.damage.calibrate._least_limit", lambda _: 1.0)
    in_parts = sources()
    assert passes[0] == 2 * len(batches)
    assert passes[1] > passes[0]
    assert in_parts == at_once


_PEAK = r"""
import re, sys, torch
from pathlib import Path
from torch import nn
from trimtab.measure.damage.indicators import gradient_damage
torch.set_num_threads(1)
model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.GELU())), nn.Linear(32, 1))
batches = [torch.randn(50_000, 32) for _ in range(2)]
def peak():  # unlike getrusage's, it knows nothing of the process that started this one
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
optimizer = torch.optim.AdamW(model.parameters())
model(batches[0][:8]).mean().backward()  # libraries allocate when they are first used
optimizer.step()
optimizer.zero_grad()
before = peak()
if sys.argv[1] == "step":
    for batch in batches:
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
else:
    gradient_damage(model, batches, lambda y: y.mean(), precisions=("tf32",))
print(peak() - before)
"""


@pytest.mark.soak
def test_the_peak_is_at_most_twice_that_of_a_training_step() -> None:
    def peak(what: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", _PEAK, what],
            capture_output=True,
            text=True,
            check=True,
            timeout=110,
            # Tensors of this size come from the system and go back to it, so that the heap's gaps do not count.
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},
        )
        return int(done.stdout)

    step, damage = peak("step"), peak("damage")
    assert step > 60 << 10, "too small to tell"
    assert damage <= 2 * step
