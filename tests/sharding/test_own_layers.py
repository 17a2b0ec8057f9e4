"""Layers of one's own, with what models do beside the plainest attention and MLPs."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from tests.sharding.jobs import convert, difference
from tests.sharding.models import WIDTH
from torch import Tensor, nn

from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from tests.support.pool import Pool

HIDDEN = 34


class InPlace(nn.Module):
    """Activations and residuals that change their input."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.feed = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(inplace=True), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.narrow(self.widen(x).mul_(2).relu_())
        y += x
        z: Tensor = self.feed(y)
        z += y
        return z


class Sloped(nn.Module):
    """An activation with a parameter, between projections with well-known names."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.activation, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.PReLU(), nn.Linear(HIDDEN, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Any:
        return x + self.gain * self.fc2(self.activation(self.fc1(x)))


LAYERS = {"in place": InPlace, "sloped": Sloped}


def gaps() -> dict[str, tuple[float, dict[str, str]]]:
    """The difference of the gradients, and what is replicated."""
    found = {}
    for name, layer in LAYERS.items():
        torch.manual_seed(0)
        alone: nn.Module = nn.Sequential(layer(), layer()).double()
        spread = convert(copy.deepcopy(alone), shares=[1, 2])
        x = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for model in (alone, spread):
            model(x).square().sum().backward()
        gap = difference(alone, spread, lambda p: p.grad)
        found[name] = gap, sharded_model(spread, "test").replicated
    return found


def test_layers_of_ones_own_have_the_gradients_of_a_single_device(ranks: Pool) -> None:
    for found in ranks(2, gaps):
        for name, (gap, replicated) in found.items():
            assert gap < 1e-10, name
            assert replicated == {}, name
