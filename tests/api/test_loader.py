"""`trimtab.loader`: epochs, resuming, a loader of one's own, and what is refused."""

from __future__ import annotations

import itertools
import sys
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from tests.support.numbers import Numbers
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import trimtab
from trimtab.api.loader import loader
from trimtab.control.shares.loader import Loader
from trimtab.control.shares.sampler import ShareSampler
from trimtab.errors import TrimtabError
from trimtab.planning.shares.batch import Adjust

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.pool import Pool


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
    data = loader(Numbers(40), 8, seed=5, shares=[1.0, 0.3, 0.55][: dist.get_world_size()], adjust=None)
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
    with pytest.raises(TrimtabError, match=r"pass the dataset, not a DataLoader"):
        loader(DataLoader(Numbers(8)), 4)  # type: ignore[arg-type]
    with pytest.raises(TrimtabError, match="set has no __getitem__"):
        loader({1, 2, 3, 4}, 4)  # type: ignore[arg-type]
    with pytest.raises(TrimtabError, match="adjust='auto': use None for fixed shares"):
        loader(Numbers(8), 4, adjust="auto")  # type: ignore[arg-type]
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
