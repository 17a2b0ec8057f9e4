"""Uneven batches in an unchanged loop: the parameters are those of the plain job, whoever computed what."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trimtab.control.shares.loss_form import loss_form
from trimtab.control.shares.script_hooks import take_over
from trimtab.control.shares.takeover import Takeover
from trimtab.planning.shares.batch import Adjust

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


def read_ahead(loader: Iterable[Any]) -> Iterator[Any]:
    """As prefetchers do: the next batch is on its way to the device while this one is used."""
    batches = iter(loader)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch


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
    scaled: bool = False,
    sharded: bool = False,
    clip: float | None = None,
    evaluate: bool = False,
    start: int = 0,
    ahead: bool = False,
    loss: Loss = F.cross_entropy,
    model: nn.Module | None = None,
    keep: bool = False,
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
    ddp: Any = net() if model is None else model
    if sharded:
        for layer in (ddp[0], ddp):
            fully_shard(layer, reshard_after_forward=not keep)
            if takeover is not None:
                takeover.watch(layer)
    else:
        ddp = Ddp(ddp)
    if takeover is not None:
        takeover.watch(ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    sizes, losses = [], []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for index, (inputs, targets) in enumerate(read_ahead(loader) if ahead else loader):
            if epoch == 0 and index < start:  # resumes inside an epoch
                continue
            last = (index + 1) % accumulate == 0 or index + 1 == len(loader)
            with nullcontext() if last else ddp.no_sync():
                value = loss(ddp(inputs), targets)
                scaler.scale(value / accumulate).backward()
            sizes.append(len(inputs))
            losses.append(value.item())
            if last:
                if clip is not None:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(ddp.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            if evaluate and index % 3 == 1:
                ddp.eval()
                for inputs, _ in held_out:
                    ddp(inputs)
                    assert len(inputs) == batch or len(inputs) == 20 % batch
                with torch.no_grad():
                    assert {len(inputs) for inputs, _ in loader} <= {batch, sampler.num_samples % batch}
                ddp.train()
    parameters = [p.full_tensor() if isinstance(p, DTensor) else p for p in ddp.parameters()]
    return torch.cat([p.detach().flatten() for p in parameters]), sizes, losses


CASES: dict[str, dict[str, Any]] = {
    "uneven tail": {},
    "drop_last, in order": {"drop_last": True, "shuffle": False},
    "accumulation over a tail": {"accumulate": 3, "clip": 0.1},
    "evaluation, a scaled loss, clipping": {"evaluate": True, "scaled": True, "clip": 0.1},
    "resumed inside an epoch": {"start": 5},
    "read one batch ahead": {"ahead": True},
    "read ahead, a sum over the batch size": {
        "ahead": True,
        "loss": lambda x, y: F.cross_entropy(x, y, reduction="sum") / len(y),
    },
    "a mean of the samples' own means": {"loss": lambda x, y: x.square().mean(1).mean()},
    "a summed loss": {"loss": lambda x, y: F.cross_entropy(x, y, reduction="sum")},
    "a sum over the batch size": {
        "loss": lambda x, y: F.cross_entropy(x, y, reduction="none").sum() / len(y)
    },
    "a sum times one over the batch size": {
        "loss": lambda x, y: F.cross_entropy(x, y, reduction="sum") * (1 / len(y))
    },
    "an annealed sum over the batch size": {"loss": lambda x, y: annealed(x, y)},
    "a mean times the batch size": {"loss": lambda x, y: F.cross_entropy(x, y) * len(y)},
    "smoothed labels": {"loss": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1)},
    "no target for the last token of each sample": {"loss": lambda x, y: causal(x, y)},
    "sharded by FSDP2": {"sharded": True, "epochs": 1},
}


STEPS = itertools.count()


def annealed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A second term that begins at zero and whose weight grows from batch to batch of the 18 of a job."""
    weight = 0.01 * (next(STEPS) % 18)
    other = logits.square().sum() / len(targets)
    return F.cross_entropy(logits, targets, reduction="sum") / len(targets) + weight * other


def causal(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Two tokens a sample, of which the last has nothing to predict: as the causal models of transformers count."""
    two = torch.stack([targets, torch.full_like(targets, -100)], 1)
    return F.cross_entropy(torch.stack([logits, 2 * logits], 1).flatten(0, 1), two.flatten())


class Returns(nn.Module):
    """Has its loss and its scores as results, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.net(inputs)
        return scores, F.cross_entropy(scores, targets)


def on_rank_results() -> None:
    """DDP passes all results of a model through one operation if parameters may be unused."""
    ddp = Ddp(Returns(), find_unused_parameters=True)
    scores, loss = ddp(*samples(8)[:])
    form = loss_form(2 * loss)
    assert (form.means, form.problem) == ((8,), None)
    assert loss_form(scores.square().mean()).means == (32,)


def test_the_loss_among_the_results_of_a_model(ranks: Pool) -> None:
    ranks(2, on_rank_results)


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
        assert not any("stay equal" in text for text in takeover.texts), (name, takeover.texts)
        assert all(value == value for value in losses)
    # The weights are needed: without them the same batches train something else.
    with taken_over(wanted) as takeover:
        takeover._weight_of = lambda *_: 1.0  # type: ignore[method-assign]
        unweighted, *_ = train(takeover)
    plain, *_ = train(None)
    assert (unweighted - plain).abs().max() > 1e-4


def on_rank_planned() -> None:
    """A plan's shares are taken when the script is known, and later ones only in place of measured ones if asked."""
    calls = 0

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 7:
            takeover.start_from((1, 3), replace=False)
        if calls == 12:
            takeover.start_from((1, 3), replace=True)
        return F.cross_entropy(logits, targets)

    plain, *_ = train(None)
    with taken_over(None, Adjust(window=1000)) as takeover:
        assert Takeover.current is takeover
        takeover.start_from((22, 10), replace=False)
        own, sizes, _ = train(takeover, loss=loss)
    assert Takeover.current is None
    assert (own - plain).abs().max() < 1e-10
    first, last = ((11, 5)[dist.get_rank()], (4, 12)[dist.get_rank()])
    assert sizes == [8] * 3 + [first] * 5 + [1] + [first] * 4 + [last] * 4 + [1]
    assert takeover.is_cutting
    assert takeover.shares == (4, 12)
    assert any("already; the plan has 4/12" in text for text in takeover.texts)


def test_the_training_is_that_of_the_plain_job(ranks: Pool) -> None:
    ranks(2, on_rank_exact)


def test_shares_start_from_those_of_a_plan(ranks: Pool) -> None:
    ranks(2, on_rank_planned)


class Slow(nn.Module):
    """Takes a time for each sample on one rank."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            time.sleep(0.01 * len(inputs))
        return inputs


def on_rank_speed() -> None:
    plain, *_ = train(None, epochs=3)
    with taken_over(None, Adjust(window=3)) as takeover:
        own, sizes, _ = train(takeover, epochs=3, model=net(Slow()))
    assert (own - plain).abs().max() < 1e-10
    assert sizes[0] == 8
    shares = takeover.shares
    assert shares is not None
    assert shares[0] > shares[1]


def test_shares_follow_speeds(ranks: Pool) -> None:
    ranks(2, on_rank_speed)


def on_rank_speed_sharded(keep: bool) -> None:
    """A rank waits for the slow one in every module, which must not count as its own work."""
    plain, *_ = train(None, epochs=3, sharded=True, keep=keep)
    with taken_over(None, Adjust(window=3)) as takeover:
        own, sizes, _ = train(takeover, epochs=3, model=net(Slow()), sharded=True, keep=keep)
    assert (own - plain).abs().max() < 1e-10
    assert sizes[0] == 8
    shares = takeover.shares
    assert shares is not None
    assert shares[0] > 2 * shares[1]


@pytest.mark.parametrize("keep", [False, True])
def test_shares_follow_speeds_under_fsdp(ranks: Pool, keep: bool) -> None:
    ranks(2, on_rank_speed_sharded, keep, allow_groups=True)
