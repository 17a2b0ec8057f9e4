"""Injected faults: results stay right when links are slow, and a dead peer ends in an error, not in a hang."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.support.faults import Delay, Drop, Fault, Throttle
from tests.support.pool import Pool, RanksError

# Since torch 2.13 the first name, and a warning at the second; before, only the second.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SLOW: list[list[Fault]] = [
    [Delay(0.01)],
    [Delay(0.02, seed=1)],
    [Delay(0.02, rank=1)],
    [Throttle(1e6)],
    [Delay(0.005), Throttle(1e6, rank=0)],
]


def use_every_operation() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, everyone = torch.full((4,), float(rank)), torch.arange(size, dtype=torch.float32)
    total = everyone.sum().item()

    reduced = mine.clone()
    works = [dist.all_reduce(reduced, async_op=True), dist.barrier(async_op=True)]
    for work in works:
        work.wait()
    assert reduced.tolist() == [total] * 4

    first = mine.clone()
    dist.broadcast(first, src=1)
    assert first.tolist() == [1.0] * 4

    gathered = torch.empty(size * 4)
    all_gather_single(gathered, mine)
    assert gathered.tolist() == everyone.repeat_interleave(4).tolist()

    parts = [torch.empty(4) for _ in range(size)]
    dist.all_gather(parts, mine)
    assert torch.cat(parts).equal(gathered)

    share = torch.empty(4)
    reduce_scatter_single(share, gathered)
    assert share.tolist() == [rank * size] * 4

    swapped = torch.empty(size)
    dist.all_to_all_single(swapped, torch.full((size,), float(rank)))
    assert swapped.equal(everyone)

    peers: list[object] = [None] * size
    dist.all_gather_object(peers, {"rank": rank})
    assert peers == [{"rank": peer} for peer in range(size)]

    received = torch.empty(4)
    work = dist.isend(mine, (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    assert work is not None
    work.wait()
    assert received.tolist() == [(rank - 1) % size] * 4


def train() -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(4):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return [float(parameter.detach().double().sum()) for parameter in model.parameters()]


def time_an_all_reduce(elements: int) -> tuple[float, float]:
    """Seconds until the call came back, and until its result was there."""
    dist.barrier()
    start = time.monotonic()
    work = dist.all_reduce(torch.ones(elements), async_op=True)
    returned = time.monotonic() - start
    assert work is not None
    work.wait()
    return returned, time.monotonic() - start


def reduce_on_a_new_group_and_a_mesh() -> tuple[str, float]:
    group = dist.new_group()
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    dist.destroy_process_group(group)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dist.all_reduce(value, group=mesh.get_group())
    return type(group).__name__, value.item()


def reduce_three_times() -> list[str]:
    """The errors met, in order; neither the rank that is cut off nor its peers may wait for ever."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    errors = []
    for step in range(3):
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            errors.append(f"{step}: {error}")
    dist.destroy_process_group(group)
    return errors


def reduce_once() -> None:
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("faults", SLOW, ids=str)
def test_slow_links_leave_results_right(ranks: Pool, faults: list[Fault]) -> None:
    ranks(2, use_every_operation, faults=faults)


@pytest.mark.parametrize("faults", SLOW[1:4], ids=str)
def test_training_over_slow_links_equals_training_over_fast_ones(ranks: Pool, faults: list[Fault]) -> None:
    plain = ranks(2, train)
    assert plain[0] == plain[1]
    assert ranks(2, train, faults=faults) == plain


def test_groups_made_from_the_default_group_suffer_too(ranks: Pool) -> None:
    assert ranks(3, reduce_on_a_new_group_and_a_mesh, faults=[Delay(0.001)]) == [("FaultyGroup", 9.0)] * 3


@pytest.mark.parametrize("fault", [Delay(0.3), Throttle(1e6)], ids=str)
def test_slow_link_holds_back_the_result_not_the_caller(ranks: Pool, fault: Fault) -> None:
    for returned, done in ranks(2, time_an_all_reduce, 75_000, faults=[fault]):
        assert done >= 0.3  # sleeping never ends early, so this holds on a busy machine too
        assert returned < done


@pytest.mark.parametrize("hang", [True, False])
def test_dropped_rank_ends_in_errors_on_every_rank(ranks: Pool, hang: bool) -> None:
    peer, dropped = ranks(2, reduce_three_times, faults=[Drop(1, rank=1, hang=hang)], timeout=30)
    assert [error[:2] for error in dropped] == ["1:", "2:"]
    assert "cut off since operation 1" in dropped[0]
    assert peer[0].startswith("1:")


def test_drop_makes_a_careless_test_fail(ranks: Pool) -> None:
    with pytest.raises(RanksError, match="cut off since operation 0"):
        ranks(2, reduce_once, faults=[Drop(0, rank=0, hang=False)])
