"""Numbers that ranks exchange between steps without waiting for each other."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tests.support.pool import Pool

from trimtab.collectives.groups import destroy_groups, private_groups
from trimtab.control.rank_values import LaterNumbers


def one_is_late() -> list[list[list[float]] | None]:
    """Rank 1 makes its first call when rank 0 has returned from its own."""
    assert dist.group.WORLD is not None
    groups = private_groups(dist.group.WORLD, torch.device("cpu"), 1)
    numbers, rank, message = LaterNumbers(groups[0]), dist.get_rank(), torch.zeros(1)
    if rank == 1:
        dist.recv(message, 0)
    rows = [numbers.exchange([rank, 10.0])]
    if rank == 0:
        dist.send(message, 1)
    rows += [numbers.exchange([rank, 20.0]), numbers.exchange([rank, 30.0])]
    dist.barrier()
    destroy_groups(groups)
    return rows


def test_numbers_arrive_at_the_next_call_and_nobody_waits(ranks: Pool) -> None:
    for rows in ranks(2, one_is_late):
        assert rows == [None, [[0.0, 10.0], [1.0, 10.0]], [[0.0, 20.0], [1.0, 20.0]]]
