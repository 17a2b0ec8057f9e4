"""Check adaptive bits on a GPU: three NCCL ranks on slices of one card.

    PYTHONPATH=src:. python3 tools/gpu_adaptive.py

Two copies of a model train on the same data: one as users have it (streams by stage, overlapping buckets,
statistics beside them), one with everything waited for. At every step their gradients must agree to the bit on
every rank, and so must every decision: a race between a stage and the statistics would show. Halfway the first
copy is saved and a third resumes it: that one must go on to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tools.gpu_ddp import WaitingRunner, gradient
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.ranks import run_on_ranks, slices
from trimtab.bench.result import Result
from trimtab.control.compression.ddp import adaptive_of, compression_of
from trimtab.emulate import Emulation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STEPS, HALFWAY = 60, 29
"""Halfway is between a look and its switch."""


class Net(nn.Module):
    """Layers whose gradients differ by orders of magnitude, and change places, so that plans do too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(12))
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x)) * 0.6 ** ((i + self.step // 20 * 4) % 12)
        return x


def model(family: str, *, waiting: bool = False) -> DistributedDataParallel:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net().cuda(), bucket_cap_mb=5)
    trimtab.compress(ddp, trimtab.Adaptive(family=family, warmup=8, look=8, period=16))
    compression = compression_of(ddp)
    assert compression is not None
    if waiting:
        compression._runner.close()
        compression._runner = WaitingRunner()
    return ddp


def train(ddp: DistributedDataParallel, step: int) -> torch.Tensor:
    """One step of SGD; gives its gradients."""
    generator = torch.Generator("cuda").manual_seed(step * 10 + dist.get_rank())
    inputs = torch.randn(256, 1024, device="cuda", generator=generator)
    ddp.zero_grad()
    ddp.module.step = step
    loss = (ddp(inputs) - inputs.flip(1)).square().mean()
    loss.backward()
    trimtab.observe_loss(ddp, loss)
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.sub_(gradient(parameter), alpha=0.1)
    return torch.cat([gradient(p).flatten() for p in ddp.parameters()])


def check(family: str) -> dict[str, Any]:
    fast, slow, resumed = model(family), model(family, waiting=True), model(family)
    differing, disagreeing, resumed_differing = 0, 0, 0
    for step in range(STEPS):
        mine = train(fast, step)
        differing += int(not torch.equal(mine, train(slow, step)))
        first = mine.clone()
        dist.broadcast(first, 0)
        disagreeing += int(not torch.equal(first, mine))
        if step == HALFWAY:
            resumed.load_state_dict(fast.state_dict())
            trimtab.load_state_dict(resumed, trimtab.state_dict(fast))
        elif step > HALFWAY:
            resumed_differing += int(not torch.equal(mine, train(resumed, step)))
    histories = [controller.history for c in (fast, slow, resumed) if (controller := adaptive_of(c))]
    counts = torch.tensor([differing, disagreeing, resumed_differing], device="cuda")
    dist.all_reduce(counts)
    bits = sorted({b for change in histories[0] for b in change.bits.values()})
    return {
        "wrong_against_waiting": int(counts[0]),
        "wrong_between_ranks": int(counts[1]),
        "wrong_after_resuming": int(counts[2]),
        "ok_same_decisions": histories[0] == histories[1] == histories[2],
        "ok_bits_changed_twice": len(histories[0]) >= 2,
        "switched_at": [change.step for change in histories[0]],
        "bits": bits,
    }


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, Any]:
    return {family: check(family) for family in ("bits", "bits-feedback")}


if __name__ == "__main__":
    from tools.gpu_adaptive import on_rank as imported  # by its importable name, for the ranks

    with Emulation(slices(3)) as emulation:
        found = run_on_ranks(emulation, imported, {"device": "cuda"})
    rows = [{"family": family, **row} for family, row in found.items()]
    wrong = sum(value for row in rows for key, value in row.items() if key.startswith("wrong"))
    fine = all(value for row in rows for key, value in row.items() if key.startswith("ok"))
    summary = {"steps": STEPS, "wrong": wrong, "ok": fine}
    print(Result(bench="adaptive on a GPU", summary=summary, rows=rows).to_json())
