"""`trimtab.loader` on real DDP jobs: the same training as on one device, however uneven the shares."""

from __future__ import annotations

import itertools
import sys
import time
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import trimtab
from trimtab.api.loader import loader
from trimtab.codec import Block
from trimtab.control.shares.loader import Loader
from trimtab.control.shares.sampler import ShareSampler
from trimtab.errors import TrimtabError
from trimtab.planning.shares.batch import Adjust

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.pool import Pool

WORDS, LENGTH, IGNORED = 12, 6, -100
SPEEDS = [1.0, 0.3, 0.55, 0.1]


class Net(nn.Module):
    """Logits of the next word; the norms make gradients depend on every word of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.up, self.norm, self.down = nn.Linear(16, 48), nn.LayerNorm(48), nn.Linear(48, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        logits: torch.Tensor = self.down(self.norm(F.gelu(self.up(x + x.cumsum(1)))))
        return logits


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def corpus(size: int) -> TensorDataset:
    """Words and their labels, of which many are ignored: all of them in every third sample."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (size, LENGTH), generator=generator)
    labels = torch.where(torch.rand(size, LENGTH, generator=generator) < 0.6, IGNORED, words.roll(-1, 1))
    labels[::3] = IGNORED
    labels[1::3, 0] = 1
    return TensorDataset(words, labels)


def targets(batch: Any) -> torch.Tensor:
    labels: torch.Tensor = batch[1]
    return (labels != IGNORED).sum()


def token_loss(model: nn.Module, batch: Any, reduction: str = "mean") -> torch.Tensor:
    logits = model(batch[0])
    return F.cross_entropy(
        logits.flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED, reduction=reduction
    )


def sample_loss(model: nn.Module, batch: Any, reduction: str = "mean") -> torch.Tensor:
    """A mean over samples of a sum over words."""
    logits = model(batch[0])
    each = F.cross_entropy(logits.flatten(0, 1), batch[0].roll(-1, 1).flatten(), reduction="none")
    of_sample = each.view(-1, LENGTH).sum(1)
    return of_sample.mean() if reduction == "mean" else of_sample.sum()


def train(
    model: nn.Module,
    trained: nn.Module,
    *,
    size: int,
    tokens: bool,
    accumulate: int = 1,
    shares: list[float] | None = None,
    reduction: str = "mean",
    weighed: bool = True,
) -> torch.Tensor:
    """Two epochs with clipping that bites; gives the parameters."""
    data = loader(
        corpus(size),
        16,
        accumulate=accumulate,
        shares=shares,
        count=targets if tokens else None,
        adjust=None,
        seed=3,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
    for _ in range(2):
        for batch in data:
            with data.sync(trained):
                loss = (token_loss if tokens else sample_loss)(trained, batch, reduction)
                weighted = data.weigh(loss, reduction=reduction)
                (weighted if weighed else loss / accumulate).backward()
            if data.last:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def alone(**settings: Any) -> torch.Tensor:
    model = net()
    return train(model, model, **settings)


def spread(settings: dict[str, Any], compression: dict[str, Any] | None) -> torch.Tensor:
    model = net()
    ddp = Ddp(model, bucket_cap_mb=1e-3)
    if compression is not None:
        trimtab.compress(ddp, **compression)
    return train(model, ddp, shares=SPEEDS[: dist.get_world_size()], **settings)


EXACT = {"codec": Block(bits=4), "min_numel": 1 << 40}
"""Through all of compression's machinery, with every parameter excluded from rounding."""


@pytest.mark.parametrize("tokens", [False, True], ids=["samples", "tokens"])
@pytest.mark.parametrize("compression", [None, EXACT], ids=["ddp", "compressed"])
@pytest.mark.parametrize(
    ("world", "accumulate", "reduction"), [(2, 1, "sum"), (3, 3, "mean"), (4, 1, "mean")]
)
def test_equals_one_device(
    ranks: Pool, world: int, accumulate: int, reduction: str, compression: dict[str, Any] | None, tokens: bool
) -> None:
    """Each epoch's last step has 2 samples: with more ranks, some take part without any."""
    settings = {"size": 50, "tokens": tokens, "reduction": reduction}
    expected = alone(**settings)
    found = ranks(world, spread, {**settings, "accumulate": accumulate}, compression, allow_groups=True)
    for parameters in found:
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("tokens", [False, True], ids=["samples", "tokens"])
def test_the_comparison_sees_a_mean_of_means(ranks: Pool, tokens: bool) -> None:
    settings = {"size": 95, "tokens": tokens}
    found = ranks(2, spread, {**settings, "weighed": False}, None)
    assert not (found[0] - alone(**settings)).abs().max() < 1e-4


def test_rounding_disturbs_no_more_than_it_does_on_even_shares(ranks: Pool) -> None:
    """8 bits: as near to one device as the codec allows, and nearer than unweighted full precision."""
    settings = {"size": 95, "tokens": True, "reduction": "mean"}
    expected, start = alone(**settings), torch.cat([p.detach().flatten() for p in net().parameters()])
    moved = (expected - start).norm()
    rounded = ranks(2, spread, settings, {"codec": Block(bits=8), "min_numel": 1}, allow_groups=True)[0]
    unweighted = ranks(2, spread, {**settings, "weighed": False}, None)[0]
    assert (rounded - expected).norm() < 0.02 * moved
    assert not (unweighted - expected).norm() < 0.05 * moved


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Paced(nn.Module):
    """Takes a given time for every sample, as a slow device would."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(1, 1)
        self.seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(x))
        y: torch.Tensor = self.weight(x / 1000)
        return y


def adapt(steps: int, slow: range, **options: Any) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """The shares of every step while rank 1 is three times slower in some; and the samples of each epoch."""
    data = loader(Numbers(88), 16, adjust=Adjust(window=3, dwell=2), **options)
    model = Paced()
    ddp = Ddp(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    shares: list[tuple[int, ...]] = []
    epochs: list[list[int]] = []
    while len(shares) < steps:
        mine: list[int] = []
        for batch in data:
            assert data._cut is not None
            mine += batch.flatten().int().tolist()[: data._cut.own]
            model.seconds = 0.002 * (3 if dist.get_rank() == 1 and len(shares) in slow else 1)
            shares.append(data._cut.shares)
            data.weigh(ddp(batch).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        epochs.append(sorted(chain.from_iterable(everyone)))
    return shares, epochs


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": True}],
    ids=["lazy", "workers"],
)
def test_a_rank_that_slows_down_loses_work_and_gets_it_back(ranks: Pool, options: dict[str, Any]) -> None:
    (shares, epochs), (others, _) = ranks(2, run_adapt, options)
    assert shares == others, "all ranks cut alike"
    assert all(epoch == list(range(88)) for epoch in epochs), "every sample once, whatever changed"
    full = [(step, each) for step, each in enumerate(shares) if sum(each) == 16]
    slowed = [each[1] for step, each in full if 42 <= step < 54]
    again = [each[1] for step, each in full if step >= 78]
    assert max(slowed) <= 6
    assert min(again) >= 7


def run_adapt(options: dict[str, Any]) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    return adapt(84, range(18, 54), **options)


def local_seconds() -> tuple[float, float]:
    """A rank's own seconds by the clock, and by its own account of a step's wall time."""
    data = loader(Numbers(64), 8, adjust=Adjust(window=1000))
    model = Paced()
    model.seconds = 0.001 if dist.get_rank() == 0 else 0.02
    ddp = Ddp(model)
    start = time.perf_counter()
    for batch in data:
        data.weigh(ddp(batch).square().mean()).backward()
    wall = (time.perf_counter() - start) / len(data)
    assert data._clock is not None
    return data._clock.read(), wall


def test_waiting_for_a_slow_peer_is_not_counted(ranks: Pool) -> None:
    (fast, wall), (slow, _) = ranks(2, local_seconds)
    assert slow > 0.08
    assert wall > 0.08
    assert fast < 0.25 * slow


class Meet(torch.autograd.Function):
    """Makes the ranks wait for each other in both directions, as a synchronised norm does."""

    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        dist.barrier()
        return x.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        dist.barrier()
        return gradient


class Meeting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Meet.apply(x)  # type: ignore[no-untyped-call]
        return y


class Late(torch.autograd.Function):
    """Takes its time in the backward pass."""

    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.08 if dist.get_rank() == 1 else 0.004)
        return gradient


def meeting_seconds(watched: bool) -> float:
    data = loader(Numbers(48), 8, adjust=Adjust(window=1000))
    model, meeting = Paced(), Meeting()
    model.seconds = 0.001 if dist.get_rank() == 0 else 0.02
    ddp = Ddp(nn.Sequential(model, meeting, nn.ReLU(inplace=True)))
    if watched:
        data.watch(ddp, (Meeting,))
    for batch in data:
        data.weigh(Late.apply(ddp(batch)).square().mean()).backward()  # type: ignore[no-untyped-call]
    assert data._clock is not None
    return data._clock.read()


def test_waiting_inside_a_watched_module_is_not_counted(ranks: Pool) -> None:
    fast, slow = ranks(2, meeting_seconds, True)
    assert fast < 0.25 * slow
    fast, slow = ranks(2, meeting_seconds, False)
    assert not fast < 0.5 * slow, "without it the wait counts as work"


def sharded_seconds(watched: bool) -> float:
    """FSDP2 waits for the slow rank in each of three modules."""
    data = loader(Numbers(48), 8, adjust=Adjust(window=1000))
    paced = Paced()
    paced.seconds = 0.001 if dist.get_rank() == 0 else 0.02
    model: Any = nn.Sequential(paced, nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 4))
    for layer in (model[1], model[3], model):
        fully_shard(layer)
    if watched:
        data.watch(model)
    for batch in data:
        data.weigh(Late.apply(model(batch)).square().mean()).backward()  # type: ignore[no-untyped-call]
    assert data._clock is not None
    return data._clock.read()


def test_waiting_under_fsdp_is_not_counted_if_watched(ranks: Pool) -> None:
    fast, slow = ranks(2, sharded_seconds, True, allow_groups=True)
    assert fast < 0.3 * slow
    fast, slow = ranks(2, sharded_seconds, False, allow_groups=True)
    assert not fast < 0.5 * slow, "without it the wait counts as work"


def own_loader() -> tuple[list[int], list[float]]:
    rank = dist.get_rank()
    sampler = ShareSampler(21, batch_size=6, rank=rank, shares=(5, 1))
    data = Loader(DataLoader(Numbers(21), batch_sampler=sampler), sampler)
    seen, weights = [], []
    for batch in data:
        assert data._cut is not None
        seen += batch.flatten().int().tolist()[: data._cut.own]
        weights.append(float(data.weigh(torch.tensor(1.0))))
    return seen, weights


def test_a_loader_of_ones_own(ranks: Pool) -> None:
    (first, large), (second, small) = ranks(2, own_loader)
    assert sorted(first + second) == list(range(21))
    assert large[:3] == pytest.approx([10 / 6] * 3)
    assert small[:3] == pytest.approx([2 / 6] * 3)
    assert large[3] + small[3] == pytest.approx(2)


def checkpointed(
    state: dict[str, Any] | None, stop_after: int | None
) -> tuple[list[list[int]], dict[str, Any]]:
    data = loader(Numbers(40), 8, seed=5, shares=SPEEDS[: dist.get_world_size()], adjust=None)
    if state is not None:
        data.load_state_dict(state)
    steps = []
    while data.epoch < 2:
        for batch in data:
            data.weigh(batch.mean())
            everyone: list[Any] = [None] * dist.get_world_size()
            assert data._cut is not None
            dist.all_gather_object(everyone, batch.flatten().int().tolist()[: data._cut.own])
            steps.append(sorted(chain.from_iterable(everyone)))
            if len(steps) == stop_after:
                return steps, data.state_dict()
    return steps, data.state_dict()


def test_resumes_in_the_middle_of_an_epoch_on_other_ranks(ranks: Pool) -> None:
    whole, _ = ranks(1, checkpointed, None, None)[0]
    begun, state = ranks(3, checkpointed, None, 3)[0]
    rest, _ = ranks(2, checkpointed, state, None)[0]
    assert begun + rest == whole


def differing() -> str:
    with pytest.raises(TrimtabError, match=r"seed is . here and something else on ranks"):
        loader(Numbers(8), 4, seed=dist.get_rank())
    with pytest.raises(TrimtabError, match="adjust is"):
        loader(Numbers(8), 4, adjust=None if dist.get_rank() else Adjust())
    with pytest.raises(TrimtabError, match="room for 4, 1"):
        loader(Numbers(8), 8, max_batch=4 if dist.get_rank() == 0 else 1)
    with pytest.raises(TrimtabError, match="give each of 2 ranks"):
        loader(Numbers(8), 8, batch_sizes=[5, 2, 1])
    assert loader(Numbers(8), 8, batch_sizes=[6, 2]).shares == (6, 2)
    return loader(Numbers(8), 8, max_batch=7 if dist.get_rank() == 0 else 1).shares.__repr__()


def test_memory_limits_and_differing_ranks(ranks: Pool) -> None:
    assert ranks(2, differing) == ["(7, 1)"] * 2


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_refuses_ranks_that_have_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrimtabError, match="init_process_group"):
        loader(Numbers(8), 4)


def test_refusals_without_a_group() -> None:
    with pytest.raises(TrimtabError, match="an IterableDataset has its own order"):
        loader(Stream(), 4)
    with pytest.raises(TrimtabError, match="raise it to 1"):
        loader(Numbers(8), 0)
    with pytest.raises(TrimtabError, match="add up to 5, and batch_size is 4"):
        loader(Numbers(8), 4, batch_sizes=[5])
    with pytest.raises(TrimtabError, match="only one of them"):
        loader(Numbers(8), 4, batch_sizes=[4], shares=[1])
    with pytest.raises(TrimtabError, match="batch_sampler is chosen by trimtab"):
        loader(Numbers(8), 4, batch_sampler=[])
    with pytest.raises(TrimtabError, match=r"batch_size=4\.0: give a whole number"):
        loader(Numbers(8), 4.0)  # type: ignore[arg-type]
    with pytest.raises(TrimtabError, match="Endless has no __len__"):
        loader(Endless(), 4)
    data = loader(Numbers(8), 4)
    with pytest.raises(TrimtabError, match="got NoneType"):
        data.load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(TrimtabError, match="inside the loop"):
        data.weigh(torch.tensor(1.0))
    with pytest.raises(TrimtabError, match="not weighed"):
        list(data)
    with torch.no_grad():
        batches = list(data)
    assert sum(len(batch) for batch in batches) == 8 - 4, "goes on where it was left"
    batch = next(iter(data))
    with pytest.raises(TrimtabError, match=r"shape \(4, 1\)"):
        data.weigh(batch)
    with pytest.raises(TrimtabError, match="the loss is a float"):
        data.weigh(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["zip", "islice", "break"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_of_exactly_one_epoch_is_followed_by_the_next(way: str, workers: int) -> None:
    """Such a loop never asks for the batch after the last, so the loader is not told that the epoch is over."""
    data = trimtab.loader(TensorDataset(torch.arange(8.0)), 2, shuffle=False, num_workers=workers)
    weight = torch.ones((), requires_grad=True)
    for epoch in range(3):
        batches: Any = data
        if way == "zip":
            batches = (batch for _, batch in zip(range(len(data)), data, strict=False))
        elif way == "islice":
            batches = itertools.islice(data, len(data))
        seen = []
        for (x,) in batches:
            data.weigh((weight * x).mean()).backward()
            seen += x.tolist()
            if way == "break" and len(seen) == 8:
                break
        assert data.epoch == epoch
        assert seen == list(map(float, range(8)))


def test_accumulation_by_accelerate_too_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would divide by the number of batches: a quarter of the gradient, in silence."""

    class GradientState:
        _shared_state: ClassVar = {"plugin_kwargs": {"num_steps": 4}}
        num_steps = 4

    monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace(GradientState=GradientState))
    data = trimtab.loader(TensorDataset(torch.arange(32.0)), 8, accumulate=4)
    weight = torch.ones((), requires_grad=True)
    (x,) = next(iter(data))
    with pytest.raises(trimtab.TrimtabError, match="gradient_accumulation_steps=4"):
        data.weigh((weight * x).mean())
