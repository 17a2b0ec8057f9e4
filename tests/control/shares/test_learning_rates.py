"""A script that counts the samples of its own batches sets other learning rates on other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from tests.control.shares.test_takeover import net, samples, taken_over
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.utils.data import DataLoader, DistributedSampler

from trimtab.control.shares.takeover import Takeover
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from tests.support.pool import Pool


def train(takeover: Takeover, *, by_samples: bool) -> int:
    """The rate falls after every step, as with a scheduler. Returns the steps."""
    data, ddp, steps, seen = samples(160), Ddp(net()), 0, 0
    takeover.watch(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for inputs, targets in DataLoader(data, batch_size=8, sampler=DistributedSampler(data)):
        F.cross_entropy(ddp(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen, steps = seen + len(inputs), steps + 1
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + (seen if by_samples else steps))
    return steps


def on_rank() -> None:
    with taken_over((11, 5)) as takeover:
        assert train(takeover, by_samples=False) == 10
    with taken_over((11, 5)) as takeover, pytest.raises(TrimtabError, match="learning rates differ, from 0"):
        train(takeover, by_samples=True)


def test_rates_that_differ_with_uneven_batches_end_the_job(ranks: Pool) -> None:
    ranks(2, on_rank)
