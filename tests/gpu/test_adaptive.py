"""Adaptive bits on a GPU: three NCCL ranks on slices of one card.

Two copies of a model train on the same data: one as users have it (streams by stage, overlapping buckets,
statistics beside them), one with everything waited for. At every step their gradients agree to the bit on every
rank, and so does every decision. Halfway the first copy is saved and a third resumes it to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.ranks import WaitingRunner, agree, gradient, on_slices, summed
from tests.support.requirements import requires
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.control.compression.ddp import adaptive_of, compression_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

pytestmark = requires(cuda=1, modules=["triton"], tools=["nvidia-cuda-mps-control"])

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


def check(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, Any]:
    family = spec["family"]
    fast, slow, resumed = model(family), model(family, waiting=True), model(family)
    differing, disagreeing, resumed_differing = 0, 0, 0
    for step in range(STEPS):
        gradients = train(fast, step)
        differing += not torch.equal(gradients, train(slow, step))
        disagreeing += not agree(gradients)
        if step == HALFWAY:
            resumed.load_state_dict(fast.state_dict())
            trimtab.load_state_dict(resumed, trimtab.state_dict(fast))
        elif step > HALFWAY:
            resumed_differing += not torch.equal(gradients, train(resumed, step))
    histories = [controller.history for c in (fast, slow, resumed) if (controller := adaptive_of(c))]
    differing, disagreeing, resumed_differing = summed(differing, disagreeing, resumed_differing)
    return {
        "differing": {"waiting": differing, "ranks": disagreeing, "resumed": resumed_differing},
        "same_decisions": len(histories) == 3 and histories[0] == histories[1] == histories[2],
        "switched_at": [change.step for change in histories[0]],
        "bits": sorted({bits for change in histories[0] for bits in change.bits.values()}),
    }


@pytest.mark.parametrize("family", ["bits", "bits-feedback"])
def test_overlapped_and_resumed_training_decides_the_same(
    family: str, record_property: Callable[[str, object], None]
) -> None:
    result = on_slices(3, check, family=family)
    record_property("switched_at", result["switched_at"])
    record_property("bits", result["bits"])
    assert result["differing"] == {"waiting": 0, "ranks": 0, "resumed": 0}
    assert result["same_decisions"]
    assert len(result["switched_at"]) >= 2, "the bits never changed: nothing was tested"
