"""Check the DDP hook on a GPU: three NCCL ranks on slices of one card.

    PYTHONPATH=src:. python3 tools/gpu_ddp.py

Two copies of a model train on the same data: one through the hook as users have it (Triton kernels,
streams by stage, overlapping buckets), one through the PyTorch reference kernels with everything
waited for. Their gradients must agree to the bit, on every rank, at every step; a race would show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.ranks import run_on_ranks, slices
from trimtab.codec import Block
from trimtab.codec.reference import ReferenceKernels
from trimtab.collectives import finish
from trimtab.doors.ddp import DdpCompression
from trimtab.emulate import Emulation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

STEPS = 30


class WaitingRunner:
    """Finishes each reduction before the next begins, on the current stream."""

    def submit(self, steps: Iterator[dist.Work], result: torch.Tensor) -> Any:
        torch.cuda.synchronize()
        finish(steps)
        torch.cuda.synchronize()
        future: Any = torch.futures.Future(devices=[result.device])
        future.set_result(result)
        return future

    def close(self) -> None:
        pass


def model() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.LayerNorm(1024)) for _ in range(12)]
    return DistributedDataParallel(nn.Sequential(*layers).cuda(), bucket_cap_mb=5)


def gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, Any]:
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
        pairs = zip(fast.parameters(), slow.parameters(), strict=True)
        differing += sum(not torch.equal(gradient(a), gradient(b)) for a, b in pairs)
        flat = torch.cat([gradient(p).flatten() for p in fast.parameters()])
        first = flat.clone()
        dist.broadcast(first, 0)
        disagreeing += int(not torch.equal(first, flat))
        with torch.no_grad():
            for a, b in zip(fast.parameters(), slow.parameters(), strict=True):
                a.sub_(gradient(a), alpha=0.1)
                b.copy_(a)
    counts = torch.tensor([differing, disagreeing], device="cuda")
    dist.all_reduce(counts)
    return {
        "steps": spec["steps"],
        "differing_gradients": int(counts[0]),
        "disagreeing_ranks": int(counts[1]),
    }


if __name__ == "__main__":
    from tools.gpu_ddp import on_rank as imported  # by its importable name, for the ranks

    with Emulation(slices(3)) as emulation:
        print(run_on_ranks(emulation, imported, {"steps": STEPS, "device": "cuda"}))
