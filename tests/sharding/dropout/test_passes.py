"""Dropout of recomputed passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tests.sharding.jobs import convert
from tests.sharding.models import WIDTH
from tests.sharding.structure.test_gradients import Mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from tests.support.pool import Pool


def example() -> Tensor:
    return torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Repeated(nn.Module):
    """A layer with dropout in front of, inside and behind its block, called twice, recomputed or not."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.front, self.feed = nn.Dropout(0.25), nn.ModuleList([DroppingFeed()])

    def forward(self, x: Tensor) -> Any:
        x = self.front(x)
        for _ in range(2):
            x = checkpoint(self.feed[0], x, use_reentrant=False) if self.recomputed else self.feed[0](x)
        return x


class DroppingFeed(Mlp):
    def __init__(self) -> None:
        super().__init__("fc1", "fc2")
        self.inside, self.behind = nn.Dropout(0.25), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Any:
        return x + self.behind(self.fc2(self.inside(self.fc1(x).relu())))


def recomputed(micro_batches: bool) -> tuple[float, str]:
    """The gap between a model that recomputes its activations and one that does not, after two steps."""
    models = []
    for again in (False, True):
        torch.manual_seed(0)
        models.append(convert(Repeated(again).double(), shares=[1, 2]))
    for model in models:
        for _ in range(2):
            try:
                losses = [model(example()).square().mean() for _ in range(2 if micro_batches else 1)]
                for loss in losses:
                    loss.backward()
            except TrimtabError as error:
                return 0.0, str(error)
    kept, second = ([p.grad for p in model.parameters()] for model in models)
    pairs = zip(kept, second, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None), ""


def test_recomputed_passes_draw_the_same_dropout(ranks: Pool) -> None:
    for gap, _ in ranks(2, recomputed, False):
        assert gap < 1e-12
    for _, error in ranks(2, recomputed, True):
        assert "call backward after each forward pass" in error
