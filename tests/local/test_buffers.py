"""Buffers of workers: running statistics become their mean, constants stay, and no worker's NaN spreads."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tests.support.pool import Pool

from trimtab.collectives import runner_for
from trimtab.local.buffers import AveragedBuffers
from trimtab.local.workers import HOST

CONSTANT = torch.tensor([0.1, 1 / 3, float("-inf"), 1e-30], dtype=torch.float64)


def averaged(rounds: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rank = dist.get_rank()
    constant, mean, spoiled = CONSTANT.clone(), torch.zeros(2), torch.ones(2)
    assert dist.group.WORLD is not None
    buffers, runner = AveragedBuffers([constant, mean, spoiled], dist.group.WORLD), runner_for(HOST)
    for _ in range(rounds):
        mean += rank
        spoiled.fill_(float("nan") if rank == 2 else 4.0)
        buffers.send(runner)
        buffers.take()
    runner.close()
    return constant, mean, spoiled


def test_statistics_are_averaged_and_constants_stay_to_the_bit(ranks: Pool) -> None:
    for constant, mean, spoiled in ranks(3, averaged, 20):
        assert torch.equal(constant, CONSTANT)
        torch.testing.assert_close(mean, torch.full((2,), 20.0))
        assert 3.9 < float(spoiled[0]) <= 4.0, "one worker's NaN counts as no change"
