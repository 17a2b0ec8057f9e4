"""Sensitivities from a job's own steps: nothing changes, little is looked at, and they follow what calibration says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.measure.damage.test_recorder import hooks
from torch import nn

from trimtab.measure.damage import sampled
from trimtab.measure.damage.indicators import gradient_damage
from trimtab.measure.damage.sampled import SampledStep
from trimtab.planning.precision.current_damage import growth
from trimtab.predict.damage import Sensitivity

PRECISIONS = ("bf16", "int8")


class Branches(nn.Module):
    """Two branches; how much each counts can be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(32, 16), nn.Linear(32, 16)
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.weights = [1.0, 0.1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.conv(x.unsqueeze(1)).mean(1)
        a, b = self.weights
        return F.mse_loss(torch.tanh(a * self.left(x) + b * self.right(x.relu())), x[:, :16].sin())


def step(model: nn.Module, watch: SampledStep, x: torch.Tensor) -> dict[str, Sensitivity]:
    watch.begin()
    model(x).backward()
    return watch.end()


def make() -> tuple[Branches, torch.Tensor, SampledStep]:
    torch.manual_seed(0)
    model = Branches()
    names = ("left", "right", "conv", "left/attention")
    return model, torch.randn(64, 32), SampledStep(model, dict.fromkeys(names, PRECISIONS))


def test_a_sampled_step_has_the_same_gradients_and_leaves_no_hook() -> None:
    model, x, watch = make()
    model(x).backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    found = step(model, watch, x)
    assert set(found) == {"left", "right", "conv"}
    assert set(found["conv"].errors) == set(PRECISIONS)
    assert hooks(model) == 0
    assert not watch.open
    torch.testing.assert_close([p.grad for p in model.parameters()], plain, rtol=0, atol=0)


def test_operators_take_turns_where_all_of_them_would_be_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, watch = make()
    monkeypatch.setattr(sampled, "MOST_BYTES", 1)
    turns = [tuple(step(model, watch, x)) for _ in range(4)]
    assert sorted(name for (name,) in turns[:3]) == ["conv", "left", "right"]
    assert turns[3] == turns[0]


def test_a_few_rows_say_what_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, watch = make()
    every = step(model, watch, x)
    monkeypatch.setattr(sampled, "MOST_VALUES", 32 * 16)
    few = step(model, watch, x)
    for name in every:
        assert few[name].size == pytest.approx(every[name].size, rel=0.7)
        assert few[name].errors["int8"] == pytest.approx(every[name].errors["int8"], rel=0.7)


def test_what_a_new_calibration_would_say_is_followed() -> None:
    """First one branch counts, then the other: their damages change places, by about as much as calibration says."""
    model, x, watch = make()
    before, first = gradient_damage(model, [x], precisions=["int8"]), step(model, watch, x)
    model.weights = [0.1, 1.0]
    after, now = gradient_damage(model, [x], precisions=["int8"]), step(model, watch, x)
    grown = growth(first, now)
    for name in ("left", "right"):
        true = after[name]["int8"] / before[name]["int8"]
        assert 1 / 3 < grown[name]["int8"] / true < 3, (name, grown, true)
        assert (true > 10) if name == "right" else (true < 0.1)
