"""DDP without its communication, however the script accumulates gradients."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.doors.silent_ddp import SilentDdp

STEPS, ENDS = 6, 3


def differing(tensor: torch.Tensor) -> bool:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    return any(not torch.equal(each, everyone[0]) for each in everyone)


def accumulated(how: str) -> tuple[list[bool], list[bool]]:
    """Whether gradients and running statistics differ among ranks, step by step; the silence ends in the fourth."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    silence = SilentDdp(ddp)
    gradients, statistics = [], []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        for last in (False, True):
            if how == "flag":
                ddp.require_backward_grad_sync = last
            with ddp.no_sync() if how == "no_sync" and not last else nullcontext():
                if step == ENDS and not last:
                    silence.end(ddp)
                ddp(torch.randn(8, 4, generator=generator)).square().mean().backward()
        gradients.append(differing(ddp.module[0].weight.grad))
        statistics.append(differing(ddp.module[1].running_mean))
        ddp.zero_grad()
    return gradients, statistics


@pytest.mark.parametrize("how", ["flag", "no_sync", "every batch"])
def test_it_is_silent_until_it_ends_and_then_as_the_script_says(ranks: Pool, how: str) -> None:
    for gradients, statistics in ranks(2, accumulated, how):
        assert gradients == [True] * ENDS + [False] * (STEPS - ENDS)
        assert all(statistics[:ENDS]), "buffers are not broadcast either"


def fails() -> bool:
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    silence = SilentDdp(ddp)
    with pytest.raises(RuntimeError):
        ddp(torch.zeros(1, 3))
    assert ddp.require_backward_grad_sync, "the script's own flag is back"
    ddp(torch.zeros(1, 4))
    silence.end(ddp)
    return bool(ddp.require_forward_param_sync)


def test_a_forward_pass_that_fails_leaves_the_flags_alone(ranks: Pool) -> None:
    assert all(ranks(2, fails))


def static_graph() -> tuple[bool, bool, bool]:
    ddp = DistributedDataParallel(nn.Linear(4, 4), static_graph=True)
    silence = SilentDdp(ddp)
    before = silence.can_end(ddp)
    for step in range(3):
        ddp(
            torch.randn(8, 4, generator=torch.Generator().manual_seed(step + dist.get_rank()))
        ).sum().backward()
    return before, silence.can_end(ddp), differing(ddp.module.weight.grad)


def test_a_static_graph_is_silent_and_stays_so(ranks: Pool) -> None:
    assert ranks(2, static_graph) == [(True, False, True)] * 2
