"""Uneven batches in an unchanged loop with SyncBatchNorm, which torch has for GPUs only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.support.requirements import requires
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trimtab.control.shares.script_hooks import take_over

if TYPE_CHECKING:
    from tests.support.pool import Pool

pytestmark = requires(cuda=1)


def trained(sizes: list[int] | None) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Parameters, running statistics and this rank's batches, after two epochs with an uneven tail."""
    takeover, give_back = (None, None) if sizes is None else take_over(sizes)
    torch.manual_seed(0)
    # A bias before batch norm has no gradient but rounding, which Adam blows up.
    first = nn.Linear(8, 16, bias=False)
    net = nn.Sequential(first, nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4)).double().cuda()
    ddp = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(net))
    if takeover is not None:
        takeover.watch(ddp)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(138, 8, generator=generator, dtype=torch.float64)
    data = TensorDataset(inputs, torch.randint(0, 4, (138,), generator=generator))
    sampler: Any = DistributedSampler(data)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    counts = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, targets in DataLoader(data, batch_size=8, sampler=sampler):
            F.cross_entropy(ddp(batch.cuda()), targets.cuda()).backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(batch))
    if give_back is not None:
        give_back()
    parameters = torch.cat([p.detach().flatten() for p in ddp.parameters()]).cpu()
    return parameters, torch.cat([b.double().flatten() for b in ddp.buffers()]).cpu(), counts


def on_rank() -> None:
    plain, plain_statistics, _ = trained(None)
    parameters, statistics, counts = trained([11, 5])
    assert counts.count((11, 5)[dist.get_rank()]) > len(counts) // 3, counts
    torch.testing.assert_close(parameters, plain, rtol=0, atol=1e-10)
    torch.testing.assert_close(statistics, plain_statistics, rtol=0, atol=1e-10)


def test_synchronized_batch_norm_is_that_of_the_global_batch(ranks: Pool) -> None:
    ranks(2, on_rank)
