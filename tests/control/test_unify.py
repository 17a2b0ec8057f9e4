"""Ranks that trained apart become one training only where nothing is left that would drive them apart again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.local.rounds import batch, flat, net
from tests.support.pool import Pool
from torch.nn import functional as F

from trimtab.control.unify import unify

MAKERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "unlike rates": lambda p: torch.optim.SGD(p, lr=1e-2 * (1 + dist.get_rank())),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=2),
}


def unified(kind: str) -> tuple[bool, bool]:
    model = net()
    optimizer = MAKERS[kind](model.parameters())
    inputs, targets = batch(1, dist.get_rank())

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = F.mse_loss(model(inputs), targets)
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(loss)
    group = dist.group.WORLD
    assert group is not None
    done = unify(model, [optimizer], group, group, samples=4, skipped=0)
    everyone = [torch.empty_like(flat(model)) for _ in range(2)]
    dist.all_gather(everyone, flat(model))
    return done, torch.equal(everyone[0], everyone[1])


@pytest.mark.parametrize("kind", MAKERS)
def test_states_are_averaged_or_nothing_is(ranks: Pool, kind: str) -> None:
    possible = kind in ("AdamW", "momentum")
    assert ranks(2, unified, kind) == [(possible, possible)] * 2
