"""Attention that names the sizes of all heads, as most small GPTs and vision transformers are written."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.sharding.jobs import convert, trained_gap
from tests.sharding.models import WIDTH
from torch import Tensor, nn

from trimtab.sharding.structure.shapes import _view
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from tests.support.pool import Pool

HEADS, PLACES = 6, 8
DIM = WIDTH // HEADS


@pytest.mark.parametrize(
    ("shape", "sizes", "local"),
    [
        ((2, 8, 4, 4), (2, 8, 24), (2, 8, 16)),  # heads joined, by the width of the input
        ((2, 8, 16), (2, 8, 6, 4), (2, 8, 4, 4)),  # and parted, by their number
        ((2, 8, 48), (2, 8, 3, 6, 4), (2, 8, 3, 4, 4)),  # queries, keys and values at once
        ((2, 8, 48), (2, 8, 6, 12), (2, 8, 4, 12)),  # fused head by head
        ((2, 8, 16), (2, -1, 6, 4), (2, 8, 4, 4)),  # with a size that is left open
        ((6, 6, 16), (6, 6, 6, 4), (6, 6, 4, 4)),  # as many samples and places as heads
        ((2, 24, 4, 4), (2, 24, 24), (2, 24, 16)),  # as many places as the width
        ((2, 4, 4, 4), (2, 4, 24), (2, 4, 16)),  # as many places as this rank has heads
        ((2, 8, 24), (2, 8, 6, 4), None),  # no tensor of this rank's heads
        ((2, 8, 16), (2, 8, 4, 4), None),  # sizes that were computed from the tensor
        ((16, 5), (2, 8, 5), None),
    ],
)
def test_sizes_of_this_ranks_heads(
    shape: tuple[int, ...], sizes: tuple[int, ...], local: tuple[int, ...] | None
) -> None:
    assert _view(shape, sizes, HEADS, 4, [DIM, 3 * DIM, 1]) == local
    assert _view(shape, sizes, HEADS, HEADS, [DIM, 3 * DIM, 1]) is None


class Attention(nn.Module):
    """Nothing in it says how many heads there are but numbers in calls."""

    slopes: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.one = nn.Parameter(torch.tensor(1.3))  # no entries at all
        if how == "temperature":
            self.temperature = nn.Parameter(torch.rand(1, HEADS, 1, 1) + 0.5)
        if how == "slopes":
            self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1))

    def forward(self, x: Tensor) -> Any:
        if self.how == "as many places as heads":
            x = x[:, :HEADS]
        elif self.how == "as many places as the width":
            x = torch.cat([x, 2 * x, x], 1)[:, :WIDTH]
        b, t, c = x.shape
        qkv = self.qkv(x)
        if self.how == "split":
            q, k, v = (each.view(b, t, HEADS, c // HEADS).transpose(1, 2) for each in qkv.split(c, dim=2))
        elif self.how == "head by head":
            q, k, v = qkv.unflatten(-1, (HEADS, 3, DIM)).permute(3, 0, 2, 1, 4)
        else:
            q, k, v = qkv.reshape(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * self.one
        if self.how == "temperature":
            scores = scores * self.temperature
        if self.how == "slopes":
            places = torch.arange(t)
            scores = scores - self.slopes[:, None, None] * (places[:, None] - places).abs()
        y = (scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(b, t, c)
        return x + self.out(y)


KINDS = (
    "at once",
    "split",
    "head by head",
    "as many places as heads",
    "as many places as the width",
    "temperature",
    "slopes",
)


def gaps() -> dict[str, tuple[float, dict[str, str], list[int]]]:
    found = {}
    for how in KINDS:
        torch.manual_seed(0)
        alone = nn.Sequential(Attention(how), Attention(how)).double()
        spread = convert(copy.deepcopy(alone), shares=[1, 2])

        def loss(model: nn.Module, step: int) -> Tensor:
            generator = torch.Generator().manual_seed(step)
            out: Tensor = model(torch.randn(2, PLACES, WIDTH, dtype=torch.float64, generator=generator))
            return out.square().mean()

        sharded = sharded_model(spread, "test")
        gap = trained_gap(alone, spread, loss)
        found[how] = gap, sharded.replicated, [block.units for block in sharded.blocks.values()]
    return found


def test_attention_with_sizes_in_its_calls_is_divided(ranks: Pool) -> None:
    for found in ranks(2, gaps):
        for how, (gap, replicated, units) in found.items():
            assert gap < 1e-10, how
            assert replicated == {}, how
            assert units == [HEADS, HEADS], how


def compiled() -> float:
    torch._dynamo.reset()
    torch.manual_seed(0)
    alone = nn.Sequential(Attention("split")).double()
    spread = convert(copy.deepcopy(alone), shares=[1, 2])
    x = torch.randn(2, PLACES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.compile(spread, backend="aot_eager", fullgraph=True)(x)
    return float((alone(x) - y).detach().abs().max())


def test_it_is_compiled_whole(ranks: Pool) -> None:
    assert max(ranks(2, compiled)) < 1e-10
