"""The DDP hook on a GPU: three NCCL ranks on slices of one card.

Two copies of a model train on the same data: one through the hook as users have it (Triton kernels, streams by
stage, overlapping buckets), one through the PyTorch reference kernels with everything waited for. A race would show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tests.gpu.ranks import WaitingRunner, agree, gradient, on_slices, summed
from tests.support.requirements import requires
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.codec import Block
from trimtab.codec.reference import ReferenceKernels
from trimtab.doors.ddp import DdpCompression

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

pytestmark = requires(cuda=1, modules=["triton"], tools=["nvidia-cuda-mps-control"])


def model() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.LayerNorm(1024)) for _ in range(12)]
    return DistributedDataParallel(nn.Sequential(*layers).cuda(), bucket_cap_mb=5)


def train(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, int]:
    fast, slow = model(), model()
    trimtab.compress(fast, Block(bits=4))
    reference = DdpCompression(slow, Block(bits=4), kernels=ReferenceKernels())
    reference._runner = WaitingRunner()
    slow.register_comm_hook(None, reference.reduce)
    differing, disagreeing = 0, 0
    for step in range(spec["steps"]):
        generator = torch.Generator("cuda").manual_seed(step * 10 + dist.get_rank())
        inputs = torch.randn(256, 1024, device="cuda", generator=generator)
        for ddp in (fast, slow):
            ddp.zero_grad()
            ddp(inputs).square().mean().backward()
        pairs = list(zip(fast.parameters(), slow.parameters(), strict=True))
        differing += sum(not torch.equal(gradient(a), gradient(b)) for a, b in pairs)
        disagreeing += not agree(torch.cat([gradient(p).flatten() for p in fast.parameters()]))
        with torch.no_grad():
            for a, b in pairs:
                a.sub_(gradient(a), alpha=0.1)
                b.copy_(a)
    differing, disagreeing = summed(differing, disagreeing)
    return {"differing_gradients": differing, "disagreeing_ranks": disagreeing}


def test_overlapped_gradients_are_those_of_waiting_for_everything() -> None:
    assert on_slices(3, train, steps=30) == {"differing_gradients": 0, "disagreeing_ranks": 0}
