"""`trimtab.loader` on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from tests.support.requirements import requires
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from trimtab.api.loader import loader
from trimtab.planning.shares.batch import Adjust

if TYPE_CHECKING:
    from tests.support.pool import Pool

pytestmark = requires(cuda=1)

SPEEDS = [1.0, 0.3]


def statistics() -> tuple[torch.Tensor, torch.Tensor]:
    """Running statistics and gradients of a synchronized norm, ranks meeting over Gloo."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)).double().cuda()
    world = dist.get_world_size()
    trained: nn.Module = model
    if world > 1:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        trained = DistributedDataParallel(model)
    inputs = torch.randn(36, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    data = loader(TensorDataset(inputs), 12, shares=SPEEDS[:world], adjust=Adjust(window=1000))
    data.watch(model)
    for (batch,) in data:
        data.weigh(trained(batch.cuda()).square().mean()).backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    buffers = torch.cat([b.double().flatten() for b in model.buffers()])
    return gradients.cpu(), buffers.cpu()


def test_synchronized_batch_norm_weighs_by_count(ranks: Pool) -> None:
    expected = ranks(1, statistics)[0]
    for result in ranks(2, statistics):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)
