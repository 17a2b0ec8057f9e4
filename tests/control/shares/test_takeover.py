"""Uneven batches in an unchanged loop: the parameters are those of the plain job, whoever computed what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trimtab.control.shares.takeover import Takeover, take_over

if TYPE_CHECKING:
    from tests.support.pool import Pool

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def net(*extra: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), *extra, nn.Linear(16, 4)).double()


def samples(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(size, 8, generator=generator, dtype=torch.float64),
        torch.randint(0, 4, (size,), generator=generator),
    )


@contextmanager
def taken_over(*arguments: Any) -> Iterator[Takeover]:
    takeover, give_back = take_over(*arguments)
    try:
        yield takeover
    finally:
        give_back()


def train(
    takeover: Takeover | None,
    *,
    size: int = 130,
    batch: int = 8,
    epochs: int = 2,
    accumulate: int = 1,
    drop_last: bool = False,
    shuffle: bool = True,
    workers: int = 0,
    scale: float = 1.0,
    clip: float | None = None,
    evaluate: bool = False,
    start: int = 0,
    loss: Loss = F.cross_entropy,
    model: nn.Module | None = None,
) -> tuple[torch.Tensor, list[int], list[float]]:
    """A training loop as users write it. Returns the parameters, this rank's batch sizes and its losses."""
    data = samples(size)
    sampler: Any = DistributedSampler(data, shuffle=shuffle, drop_last=drop_last)
    loader = DataLoader(
        data,
        batch_size=batch,
        sampler=sampler,
        drop_last=drop_last,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    held_out = DataLoader(
        samples(40), batch_size=batch, sampler=DistributedSampler(samples(40), shuffle=False)
    )
    ddp = Ddp(net() if model is None else model)
    if takeover is not None:
        takeover.watch(ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    sizes, losses = [], []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for index, (inputs, targets) in enumerate(loader):
            if epoch == 0 and index < start:  # resumes inside an epoch
                continue
            last = (index + 1) % accumulate == 0 or index + 1 == len(loader)
            with nullcontext() if last else ddp.no_sync():
                value = loss(ddp(inputs), targets)
                (value * scale / accumulate).backward()
            sizes.append(len(inputs))
            losses.append(value.item())
            if last:
                if clip is not None:
                    nn.utils.clip_grad_norm_(ddp.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
            if evaluate and index % 3 == 1:
                ddp.eval()
                for inputs, _ in held_out:
                    ddp(inputs)
                    assert len(inputs) == batch or len(inputs) == 20 % batch
                with torch.no_grad():
                    assert {len(inputs) for inputs, _ in loader} <= {batch, sampler.num_samples % batch}
                ddp.train()
    return torch.cat([p.detach().flatten() for p in ddp.parameters()]), sizes, losses


CASES: dict[str, dict[str, Any]] = {
    "uneven tail": {},
    "drop_last, in order": {"drop_last": True, "shuffle": False},
    "accumulation over a tail": {"accumulate": 3, "clip": 0.1},
    "workers that prefetch": {"workers": 1},
    "evaluation and a scaled loss": {"evaluate": True, "scale": 1024.0},
    "resumed inside an epoch": {"start": 5},
    "a summed loss": {"loss": lambda x, y: F.cross_entropy(x, y, reduction="sum")},
    "a sum over the batch size": {
        "loss": lambda x, y: F.cross_entropy(x, y, reduction="none").sum() / len(y)
    },
}


def on_rank_exact() -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    wanted = [11, 5] if world_size == 2 else [13, 8, 3]
    for name, case in CASES.items():
        plain, plain_sizes, _ = train(None, **case)
        with taken_over(wanted) as takeover:
            own, sizes, losses = train(takeover, **case)
        assert (own - plain).abs().max() < 1e-10, (name, (own - plain).abs().max())
        assert sizes.count(wanted[rank]) > len(sizes) // 3, (name, sizes)
        assert sizes[:3] == plain_sizes[:3]
        assert all(value == value for value in losses)
    # The weights are needed: without them the same batches train something else.
    with taken_over(wanted) as takeover:
        takeover._weight_of = lambda *_: 1.0  # type: ignore[method-assign]
        unweighted, *_ = train(takeover)
    plain, *_ = train(None)
    assert (unweighted - plain).abs().max() > 1e-4


def test_the_training_is_that_of_the_plain_job(ranks: Pool) -> None:
    ranks(2, on_rank_exact)
