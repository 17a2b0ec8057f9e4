"""Cutting the batches of a script's own loader: the same samples in every step, also when batches are drawn ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from trimtab.control.shares.cutting import (
    BESIDE,
    CutLoader,
    StepLoaders,
    _accelerate_steps,
    _distributed_steps,
)

DATA = range(1000)


@given(
    length=st.integers(1, 60),
    world_size=st.integers(1, 4),
    batch=st.integers(1, 7),
    drop=st.tuples(st.booleans(), st.booleans()),
    epoch=st.integers(0, 3),
)
def test_steps_of_a_distributed_sampler(
    length: int, world_size: int, batch: int, drop: tuple[bool, bool], epoch: int
) -> None:
    def sampler(rank: int) -> DistributedSampler[int]:
        own: DistributedSampler[int] = DistributedSampler(DATA[:length], world_size, rank, drop_last=drop[0])  # type: ignore[arg-type]
        own.set_epoch(epoch)
        return own

    if drop[0] and length < world_size:
        return
    plain = [list(BatchSampler(sampler(rank), batch, drop[1])) for rank in range(world_size)]
    own = sampler(world_size - 1)
    steps = list(_distributed_steps(own, BatchSampler(own, batch, drop[1])))
    assert [list(step) for step in steps] == [list(step) for step in zip(*plain, strict=True)]


@given(
    length=st.integers(1, 60),
    world_size=st.integers(1, 4),
    batch=st.integers(1, 4),
    drop_last=st.booleans(),
    split=st.booleans(),
)
def test_steps_of_accelerate(length: int, world_size: int, batch: int, drop_last: bool, split: bool) -> None:
    shard_of = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    size = batch * world_size if split else batch

    def shard(rank: int) -> object:
        order = RandomSampler(DATA[:length], generator=torch.Generator().manual_seed(3))
        return shard_of(BatchSampler(order, size, drop_last), world_size, rank, split_batches=split)

    plain = [list(shard(rank)) for rank in range(world_size)]  # type: ignore[call-overload]
    steps = [list(step) for step in _accelerate_steps(shard(world_size - 1))]
    assert steps == [list(step) for step in zip(*plain, strict=True)]


def epoch() -> Iterator[Sequence[list[int]]]:
    return (
        [list(range(8 * step + 4 * rank, 8 * step + 4 * rank + 4)) for rank in (0, 1)] for step in range(6)
    )


def cut(rank: int) -> CutLoader:
    return CutLoader(epoch, batch_size=4, rank=rank, world_size=2, in_training=lambda: True)


def test_a_change_takes_effect_in_the_same_step_on_ranks_that_drew_ahead() -> None:
    loaders = [cut(0), cut(1)]
    epochs = [iter(loader) for loader in loaders]
    batches = [list(islice(own, ahead)) for own, ahead in zip(epochs, (3, 2), strict=True)]
    at = max(loader.drawn for loader in loaders)
    for loader in loaders:
        loader.change((7, 1), at=at)
    for own, drawn in zip(batches, epochs, strict=True):
        own += drawn
    assert [len(batch) for batch in batches[0]] == [4, 4, 4, 7, 7, 7]
    for step, (first, second) in enumerate(zip(*batches, strict=True)):
        assert first + second == list(range(8 * step, 8 * step + 8))
    for own, issued in zip(batches, epochs, strict=True):
        assert [batch.own for batch in issued.issued] == list(map(len, own))
    weights = [[batch.weight for batch in issued.issued] for issued in epochs]
    assert {a + b for a, b in zip(*weights, strict=True)} == {2.0}


def test_evaluation_is_not_cut() -> None:
    loader = cut(0)
    loader.change((7, 1), at=0)
    with torch.no_grad():
        assert {len(batch) for batch in loader} == {4}
    assert {len(batch) for batch in loader} == {7}


def test_a_loader_beside_is_one_that_every_step_takes_from() -> None:
    loaders = StepLoaders()
    for _ in range(5):  # an evaluation before the first step, and now and then
        loaders.deliver_beside()
        assert loaders.begin_step() is None
        assert loaders.begin_step() is None
    loaders.deliver_beside()
    assert loaders.begin_step() is None
    loaders.deliver_beside()
    assert loaders.begin_step() == BESIDE


def test_turns_are_changes_before_a_loader_is_known() -> None:
    loaders = StepLoaders()
    assert not any(loaders.go_to_another(known=True) for _ in range(5)), "a new loader in every epoch"
    assert [loaders.go_to_another(known=False) for _ in range(4)] == [False, False, True, True]
    assert loaders.go_to_another(known=True), "it stays so"
