"""Exchanges in both directions at once: what arrives is what torch's own collectives bring."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.collectives.duplex import Ahead, _Starter, all_gather, all_to_all
from trimtab.collectives.reduction import Works

if TYPE_CHECKING:
    from tests.support.pool import Pool


def values(rank: int, numel: int, turn: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randint(0, 255, (numel,), dtype=torch.uint8, generator=generator)


def exchange_several(numel: int) -> None:
    """Three of each are on the way at once, as buckets are; sizes between two ranks may be zero."""
    group = dist.group.WORLD
    assert group is not None
    rank, world = group.rank(), group.size()
    sizes = [[(sender * 3 + receiver) % 3 * numel for receiver in range(world)] for sender in range(world)]
    out, into = sizes[rank], [row[rank] for row in sizes]
    pending = []
    for turn in range(3):
        mine, sent = values(rank, numel, turn), values(rank, sum(out), 10 + turn)
        gathered = torch.zeros(world * numel, dtype=torch.uint8)
        received = torch.zeros(sum(into), dtype=torch.uint8)
        works = all_gather(gathered, mine, group), all_to_all(received, sent, into, out, group)
        pending.append((mine, sent, gathered, received, works))
    for mine, sent, gathered, received, works in pending:
        for work in works:
            work.wait()
        expected = torch.zeros_like(gathered), torch.zeros_like(received)
        all_gather_single(expected[0], mine, group)
        dist.all_to_all_single(expected[1], sent, into, out, group=group)
        assert torch.equal(gathered, expected[0])
        assert torch.equal(received, expected[1])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("numel", [1, 300_000])
def test_arrives_as_by_torchs_collectives(ranks: Pool, world: int, numel: int) -> None:
    ranks(world, exchange_several, numel)


def gather_ahead() -> None:
    """Another thread starts the gathers, while this one exchanges tensors of the same size by itself."""
    group = dist.group.WORLD
    assert group is not None
    rank, numel = group.rank(), 100_000
    pending = []
    for turn in range(6):
        mine, own = values(rank, numel, turn), values(rank, numel, 20 + turn)
        gathered, received = torch.zeros(2 * numel, dtype=torch.uint8), torch.zeros_like(own)
        work = all_gather(gathered, mine, group, ahead=True)
        assert isinstance(work, Ahead)
        works = work, dist.irecv(received, 1 - rank), dist.isend(own, 1 - rank)
        pending.append((turn, gathered, received, own, works))
    for turn, gathered, received, _, works in pending:
        for each in works:
            assert each is not None
            each.wait()
        assert torch.equal(gathered, torch.cat([values(r, numel, turn) for r in range(2)]))
        assert torch.equal(received, values(1 - rank, numel, 20 + turn))


def test_what_another_thread_starts_is_not_taken_for_what_the_caller_sends(ranks: Pool) -> None:
    ranks(2, gather_ahead)


def test_what_fails_in_the_other_thread_is_raised_where_it_is_waited_for() -> None:
    def start() -> dist.Work:
        raise RuntimeError("no connection")

    work = Ahead(start)
    with pytest.raises(RuntimeError, match="no connection"):
        work.wait()


def test_the_other_thread_leaves_after_what_was_submitted_and_comes_back() -> None:
    starter = _Starter()
    for _ in range(2):
        started: Future[dist.Work] = Future()
        starter.submit(lambda: Works(torch.device("cpu")), started)
        thread = starter._thread
        assert thread is not None
        starter.close(5)
        assert started.done()
        assert not thread.is_alive()
