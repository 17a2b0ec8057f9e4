"""Error feedback under a GradScaler: what is owed follows the scale, so training is that without a scaler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.codec import Block, Codec, PowerSGD, TopK


class Net(nn.Module):
    """Its second layer is used in every other step only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.often, self.seldom = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        y: torch.Tensor = self.often(x)
        return y if step % 2 else y + self.seldom(x)


def trained(codec: Codec, scaled: bool, find_unused: bool, resume_at: int = -1) -> tuple[torch.Tensor, float]:
    """12 steps; the scale doubles after every third, and falls once by hand. Returns parameters and last scale."""
    ddp, state = compressed(codec, find_unused), None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3, enabled=scaled)
    source = torch.Generator().manual_seed(dist.get_rank())
    for step in range(12):
        if step == resume_at:
            state = trimtab.state_dict(ddp)
            weights = ddp.module.state_dict()
            ddp = compressed(codec, find_unused)
            ddp.module.load_state_dict(weights)
            trimtab.load_state_dict(ddp, state)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        x = torch.randn(8, 64, generator=source)
        loss = ddp(x, step if find_unused else 0).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(new_scale=2.0 if step == 7 and scaled else None)
    return torch.cat([p.detach().flatten() for p in ddp.parameters()]), scaler.get_scale()


def compressed(codec: Codec, find_unused: bool) -> Any:
    ddp = DistributedDataParallel(Net(), find_unused_parameters=find_unused)
    return trimtab.compress(ddp, codec, error_feedback=True)


def beside_a_scaled_model(codec: Codec) -> torch.Tensor:
    """A model without a scaler, whose steps alternate with those of a scaled one."""
    ddp, other = compressed(codec, False), compressed(codec, False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1)
    source = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(12):
        x = torch.randn(8, 64, generator=source)
        scaler.scale(other(x, 0).square().mean()).backward()
        scaler.update(new_scale=2 * scaler.get_scale())
        optimizer.zero_grad()
        ddp(x, 0).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in ddp.parameters()])


def both(codec: Codec, find_unused: bool) -> tuple[float, float]:
    plain, _ = trained(codec, False, find_unused)
    scaled, scale = trained(codec, True, find_unused)
    resumed, _ = trained(codec, True, find_unused, resume_at=5)
    assert torch.equal(resumed, scaled)
    if not find_unused:
        assert torch.equal(beside_a_scaled_model(codec), plain)
    return float((scaled - plain).abs().max() / plain.abs().max()), scale


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize(
    ("codec", "largest"),
    # Scales are powers of two, which Block and TopK do not notice at all.
    [(Block(bits=2, block=128, stochastic=False), 0.0), (TopK(0.05), 0.0), (PowerSGD(2), 1e-5)],
    ids=str,
)
def test_feedback_follows_the_scale(ranks: Pool, codec: Codec, largest: float, find_unused: bool) -> None:
    for difference, scale in ranks(2, both, codec, find_unused, allow_groups=True):
        assert difference <= largest
        assert scale == 4.0
