"""What a script compiles still meets the take-over of its batches, and compiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.control.shares.test_takeover import samples, taken_over
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.utils.data import DataLoader, DistributedSampler

if TYPE_CHECKING:
    from tests.support.pool import Pool


@torch.compile(backend="aot_eager", fullgraph=True)
def mean_over_ranks(loss: torch.Tensor) -> torch.Tensor:
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return whole / dist.get_world_size()


def on_rank() -> None:
    with taken_over((11, 5)) as takeover:
        ddp = Ddp(nn.Linear(8, 4).double())
        takeover.watch(ddp)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

        @torch.compile(backend="aot_eager")
        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(inputs), targets)
            loss.backward()
            optimizer.step()
            return loss

        data = samples(64)
        for inputs, targets in DataLoader(data, batch_size=8, sampler=DistributedSampler(data)):
            loss = step(inputs, targets)
            own = [torch.zeros_like(loss) for _ in range(2)]
            dist.all_gather(own, loss.detach())
            assert torch.allclose(mean_over_ranks(loss), torch.stack(own).mean())
        (text,) = takeover.texts
    assert "not known (CompiledFunctionBackward)" in text


def test_a_compiled_step_and_a_compiled_collective(ranks: Pool) -> None:
    ranks(2, on_rank)
