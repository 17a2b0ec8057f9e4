"""A late worker delays the fragment under way, and not the steps of the others, up to the stated bound."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tests.local.rounds import flat, net
from tests.support.pool import Pool

from trimtab.local.worker import LocalWorker
from trimtab.local_settings import LocalSettings

SETTINGS = LocalSettings(every=8, outer_lr=1.0, outer_momentum=0.0, delay=2, patience=3)


def one_is_late() -> tuple[int, torch.Tensor]:
    """Rank 1 ends its round only when rank 0 has taken all steps that it may take without rank 1's fragment."""
    model, rank = net(), dist.get_rank()
    assert dist.group.WORLD is not None
    worker = LocalWorker(model, dist.group.WORLD, SETTINGS)
    message = torch.zeros(1)

    def steps(count: int) -> None:
        for _ in range(count):
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(rank + 1.0)
            worker.step(4)

    if rank == 0:
        steps(8 + SETTINGS.delay + SETTINGS.patience - 1)
        dist.send(message, 1)
    else:
        steps(7)
        dist.recv(message, 0)
        steps(1 + SETTINGS.delay + SETTINGS.patience - 1)
    steps(1)
    with worker.agreed_weights():
        agreed = flat(model).clone()
    worker.close()
    return worker.late, agreed


def test_others_go_on_while_one_is_late(ranks: Pool) -> None:
    (late, first), (_, second) = ranks(2, one_is_late)
    assert late == 1
    assert torch.equal(first, second)
    torch.testing.assert_close(first, flat(net()) + 8 * 1.5, msg="the mean of what both added in the round")
