"""A compressed DDP job that resumes goes on with the bits, buckets and memory of the saved one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from tests.doors.test_ddp import make, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp

import trimtab
from trimtab.codec import Block, Codec, PowerSGD
from trimtab.control.compression.ddp import compression_of

if TYPE_CHECKING:
    from tests.support.pool import Pool


def wide() -> Ddp:
    """Buckets that are too large for one all-gather; DDP's first ones are others."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)))
    return trimtab.compress(Ddp(net, bucket_cap_mb=0.5), Block(bits=8), seed=5)


def descend(ddp: Ddp, steps: range) -> None:
    for step in steps:
        ddp.zero_grad()
        generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
        x = torch.randn(8, 256, generator=generator)
        (ddp(x) - x.flip(1)).square().mean().backward()
        with torch.no_grad():
            for parameter in ddp.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad)


def interrupted_in_many_buckets() -> tuple[bool, int, int]:
    whole = wide()
    descend(whole, range(1))
    compression = compression_of(whole)
    assert compression is not None
    first = trimtab.state_dict(whole)["compression"]["buckets"]
    descend(whole, range(1, 3))
    saved, weights = trimtab.state_dict(whole), {k: v.clone() for k, v in whole.module.state_dict().items()}
    assert saved["compression"]["buckets"] != first
    descend(whole, range(3, 6))
    resumed = wide()
    resumed.module.load_state_dict(weights)
    trimtab.load_state_dict(resumed, saved)
    descend(resumed, range(3, 6))
    same = all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    return same, len(compression._reductions), len(saved["compression"]["buckets"])


def test_a_resumed_run_begins_with_the_buckets_of_the_saved_one(ranks: Pool) -> None:
    for same, reductions, buckets in ranks(3, interrupted_in_many_buckets, allow_groups=True):
        assert same
        assert reductions == buckets > 1  # those of the first step are gone


def interrupted(codec: Codec, feedback: bool | None) -> bool:
    whole = make(codec, error_feedback=feedback)
    train(whole, range(8))
    first = make(codec, error_feedback=feedback)
    optimizer = train(first, range(4))
    checkpoint = {
        "model": first.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "trimtab": trimtab.state_dict(first),
    }
    second = make(codec, error_feedback=feedback)
    second.module.load_state_dict(checkpoint["model"])
    resumed = torch.optim.AdamW(second.parameters(), lr=1e-2)
    resumed.load_state_dict(checkpoint["optimizer"])
    trimtab.load_state_dict(second, checkpoint["trimtab"])
    train(second, range(4, 8), resumed)
    pairs = zip(whole.parameters(), second.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("codec", "feedback"), [(Block(), False), (Block(bits=2), True), (PowerSGD(4), None)]
)
def test_a_resumed_run_continues_with_the_same_bits(ranks: Pool, codec: Codec, feedback: bool | None) -> None:
    assert ranks(2, interrupted, codec, feedback, allow_groups=True) == [True, True]
