"""Exchanges in both directions at once: what arrives is what torch's own collectives bring."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.collectives.duplex import all_gather, all_to_all

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
