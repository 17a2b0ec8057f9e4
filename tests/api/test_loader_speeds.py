"""`trimtab.loader` on ranks of unequal speed: shares follow, and waiting for other ranks does not count as work."""

from __future__ import annotations

import time
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.support.numbers import Numbers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as Ddp

from trimtab.api.loader import loader
from trimtab.planning.shares.batch import Adjust

if TYPE_CHECKING:
    from tests.support.pool import Pool


class Paced(nn.Module):
    """Takes a given time for every sample, as a slow device would."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(1, 1)
        self.seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(x))
        y: torch.Tensor = self.weight(x / 1000)
        return y


def adapt(steps: int, slow: range, **options: Any) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """The shares of every step while rank 1 is three times slower in some; and the samples of each epoch."""
    data = loader(Numbers(88), 16, adjust=Adjust(window=3, dwell=2), **options)
    model = Paced()
    ddp = Ddp(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    shares: list[tuple[int, ...]] = []
    epochs: list[list[int]] = []
    while len(shares) < steps:
        mine: list[int] = []
        for batch in data:
            assert data._cut is not None
            mine += batch.flatten().int().tolist()[: data._cut.own]
            model.seconds = 0.002 * (3 if dist.get_rank() == 1 and len(shares) in slow else 1)
            shares.append(data._cut.shares)
            data.weigh(ddp(batch).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        epochs.append(sorted(chain.from_iterable(everyone)))
    return shares, epochs


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": True}],
    ids=["lazy", "workers"],
)
def test_a_rank_that_slows_down_loses_work_and_gets_it_back(ranks: Pool, options: dict[str, Any]) -> None:
    (shares, epochs), (others, _) = ranks(2, run_adapt, options)
    assert shares == others, "all ranks cut alike"
    assert all(epoch == list(range(88)) for epoch in epochs), "every sample once, whatever changed"
    full = [(step, each) for step, each in enumerate(shares) if sum(each) == 16]
    slowed = [each[1] for step, each in full if 42 <= step < 54]
    again = [each[1] for step, each in full if step >= 78]
    assert max(slowed) <= 6
    assert min(again) >= 7


def run_adapt(options: dict[str, Any]) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    return adapt(84, range(18, 54), **options)


def local_seconds() -> tuple[float, float]:
    """A rank's own seconds by the clock, and by its own account of a step's wall time."""
    data = loader(Numbers(64), 8, adjust=Adjust(window=1000))
    model = Paced()
    model.seconds = 0.001 if dist.get_rank() == 0 else 0.02
    ddp = Ddp(model)
    start = time.perf_counter()
    for batch in data:
        data.weigh(ddp(batch).square().mean()).backward()
    wall = (time.perf_counter() - start) / len(data)
    assert data._clock is not None
    return data._clock.read(), wall


def test_waiting_for_a_slow_peer_is_not_counted(ranks: Pool) -> None:
    (fast, wall), (slow, _) = ranks(2, local_seconds)
    assert slow > 0.08
    assert wall > 0.08
    assert fast < 0.25 * slow


class Meet(torch.autograd.Function):
    """Makes the ranks wait for each other in both directions, as a synchronised norm does."""

    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        dist.barrier()
        return x.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        dist.barrier()
        return gradient


class Meeting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Meet.apply(x)  # type: ignore[no-untyped-call]
        return y


class Late(torch.autograd.Function):
    """Takes its time in the backward pass."""

    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.08 if dist.get_rank() == 1 else 0.004)
        return gradient


def meeting_seconds(watched: bool) -> float:
    data = loader(Numbers(48), 8, adjust=Adjust(window=1000))
    model, meeting = Paced(), Meeting()
    model.seconds = 0.001 if dist.get_rank() == 0 else 0.02
    ddp = Ddp(nn.Sequential(model, meeting, nn.ReLU(inplace=True)))
    if watched:
        data.watch(ddp, (Meeting,))
    for batch in data:
        data.weigh(Late.apply(ddp(batch)).square().mean()).backward()  # type: ignore[no-untyped-call]
    assert data._clock is not None
    return data._clock.read()


def test_waiting_inside_a_watched_module_is_not_counted(ranks: Pool) -> None:
    fast, slow = ranks(2, meeting_seconds, True)
    assert fast < 0.25 * slow
    fast, slow = ranks(2, meeting_seconds, False)
    assert not fast < 0.5 * slow, "without it the wait counts as work"


def sharded_seconds(watched: bool) -> float:
    """FSDP2 waits for the slow rank in each of three modules."""
    data = loader(Numbers(48), 8, adjust=Adjust(window=1000))
    paced = Paced()
    paced.seconds = 0.001 if dist.get_rank() == 0 else 0.02
    model: Any = nn.Sequential(paced, nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 4))
    for layer in (model[1], model[3], model):
        fully_shard(layer)
    if watched:
        data.watch(model)
    for batch in data:
        data.weigh(Late.apply(model(batch)).square().mean()).backward()  # type: ignore[no-untyped-call]
    assert data._clock is not None
    return data._clock.read()


def test_waiting_under_fsdp_is_not_counted_if_watched(ranks: Pool) -> None:
    fast, slow = ranks(2, sharded_seconds, True, allow_groups=True)
    assert fast < 0.3 * slow
    fast, slow = ranks(2, sharded_seconds, False, allow_groups=True)
    assert not fast < 0.5 * slow, "without it the wait counts as work"
