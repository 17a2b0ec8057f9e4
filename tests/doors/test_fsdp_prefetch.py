"""Weights of the next module travel while one computes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import trimtab
from trimtab.codec import Block
from trimtab.collectives.reduction import Works

if TYPE_CHECKING:
    from tests.support.pool import Pool

WIDTH = 33
door: Any = import_module("trimtab.doors.fsdp_group")


class Layers(nn.Module):
    """Three layers, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if not (skip and index == 1):
                x = torch.tanh(layer(x))
        return x * self.scale


def make() -> Any:
    net = Layers()
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)


def pending(skipped: int | None) -> tuple[list[int], int, bool]:
    """Gathers under way when the first layer computes, in each pass; the most when the last one computes backward.

    And whether weights are those of plain FSDP2 in the end. The second layer is left out of the step `skipped`.
    """
    under_way: set[int] = set()
    ahead: list[int] = []
    behind, start = [0], door.all_gather

    class Noted(Works):
        def wait(self, timeout: Any = None) -> bool:
            under_way.discard(id(self))
            return super().wait(timeout)

    def noted(output: torch.Tensor, values: torch.Tensor, group: dist.ProcessGroup, **how: bool) -> dist.Work:
        work = Noted(values.device, [start(output, values, group, **how)])
        under_way.add(id(work))
        return work

    door.all_gather = noted
    nets = make(), make()
    try:
        trimtab.compress(nets[0], Block(bits=8), min_numel=1 << 20)  # so that gradients are exact, too
        nets[0].layers[0].register_forward_hook(lambda *_: ahead.append(len(under_way)))
        nets[0].layers[2].register_full_backward_hook(lambda *_: behind.append(len(under_way)))
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        for step in range(4):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            for net, optimizer in zip(nets, optimizers, strict=True):
                net(x, skip=step == skipped).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert not under_way
            with torch.no_grad():
                nets[0](x)
            assert not under_way
    finally:
        door.all_gather = start
    weights = []
    for net in nets:
        net.reshard()  # a pass without gradients leaves the root's weights gathered
        weights.append([p.full_tensor() for p in net.parameters()])
    alike = all(torch.allclose(own, exact, atol=1e-6) for own, exact in zip(*weights, strict=True))
    return ahead[::2], max(behind), alike


@pytest.mark.parametrize("skipped", [None, 2])
def test_weights_of_the_next_layer_travel_while_one_computes(ranks: Pool, skipped: int | None) -> None:
    for ahead, behind, alike in ranks(2, pending, skipped, allow_groups=True):
        assert ahead == [0, 1, 1, 1]  # the first pass learns the order
        assert behind == (1 if skipped is None else 2)  # what was left out is let go of when backward ends
        assert alike
