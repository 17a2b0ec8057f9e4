"""`TRIMTAB_LOG=debug`: every decision with the figures behind it, also when nothing changes, on rank 0."""

from __future__ import annotations

import logging

import torch
from tests.support.pool import Pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import trimtab
from trimtab import Adaptive
from trimtab.environment import logger
from trimtab.planning.shares.batch import Adjust


def logged() -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log, level = logger(), logger().level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        ddp = DistributedDataParallel(nn.Linear(64, 64))
        trimtab.compress(ddp, Adaptive(warmup=4, look=4, period=8))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        data = trimtab.loader(TensorDataset(torch.randn(96, 64)), 8, adjust=Adjust(window=2))
        for (batch,) in data:
            data.weigh(ddp(batch).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return lines


def test_decisions_are_logged_with_their_figures(ranks: Pool) -> None:
    lines, others = ranks(2, logged, allow_groups=True)
    assert others == []
    for words in (" ms plain, ", "the last run of this job", ": family ", "weight ", "with a noise of "):
        assert any(words in line for line in lines), f"{words!r} is in none of {lines}"
