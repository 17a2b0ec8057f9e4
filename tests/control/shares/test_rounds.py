"""Unequal numbers of inner steps: rounds deal out every sample once, and count by samples in the agreement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.local.rounds import WIDTH, flat, net, optimizer_for, train_on
from torch.utils.data import TensorDataset

import trimtab
from trimtab.control.running_local_steps import local_steps_of
from trimtab.control.shares.rounds import RoundCut, RoundSampler
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from tests.support.pool import Pool


@given(
    length=st.integers(1, 400),
    own=st.integers(1, 5),
    speeds=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4),
    every=st.integers(1, 9),
)
def test_rounds_deal_out_every_sample_once(length: int, own: int, speeds: list[float], every: int) -> None:
    ranks = len(speeds)
    if length < own * ranks:
        return
    samplers = [
        RoundSampler(length, batch_size=own * ranks, rank=rank, speeds=speeds, every=lambda: every)
        for rank in range(ranks)
    ]
    batches = [list(sampler) for sampler in samplers]
    dealt = [index for each in batches for batch in each for index in batch]
    assert len(set(dealt)) == len(dealt)
    assert length - len(dealt) < own * ranks, "fewer are left out than a step of every rank has"
    assert all(len(batch) == own for each in batches for batch in each)
    assert [len(each) for each in batches] == [len(sampler) for sampler in samplers]
    cuts = [list(sampler.issued) for sampler in samplers]
    ends = [[cut.ends_at for cut in each if isinstance(cut, RoundCut) and cut.ends] for each in cuts]
    assert all(each == ends[0] for each in ends), "rounds end together"


def test_shares_are_steps_in_proportion_to_speeds() -> None:
    sampler = RoundSampler(1000, batch_size=8, rank=0, speeds=(1.0, 0.4), every=lambda: 7)
    assert sampler.shares == (10, 4)
    sampler.change((7, 7))
    assert sampler.shares == (7, 7)
    assert len(next(iter(sampler))) == 4


EVERY, STEPS = 6, (8, 4)


def in_rounds(fragments: int, bits: int | None) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """Two rounds of 8 and 4 steps with batches of 4 samples, and a shorter one of 2 and 1."""
    model = net()
    data = trimtab.loader(
        TensorDataset(*samples()), 8, shares=(2, 1), adjust=None, uneven="steps", shuffle=False
    )
    delay = EVERY // fragments if fragments > 1 else 0
    settings = {"outer_lr": 1.0, "outer_momentum": 0.0, "fragments": fragments, "delay": delay}
    trimtab.local_steps(model, every=EVERY, bits=bits, **settings)  # type: ignore[arg-type]
    optimizer = optimizer_for(model)
    ends = []
    for inputs, targets in data:
        data.weigh(F.mse_loss(model(inputs), targets)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(data.round_ends)
        if not ends[-1]:
            with pytest.raises(TrimtabError, match="save at its end"):
                data.state_dict()
    assert data.state_dict()["epoch"] == 1
    local = local_steps_of(model)
    assert local is not None
    local.finish_step()
    assert local.worker is not None
    for fragment in local.worker.fragments:
        if fragment.in_flight:
            fragment.take()
    with trimtab.agreed_weights(model):
        agreed = flat(model).clone()
    local.close()
    assert dist.get_world_size() == 2
    return flat(model).clone(), agreed, ends


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    count = 4 * (12 + 12 + 3)
    return torch.randn(count, WIDTH, generator=generator), torch.randn(count, 3, generator=generator)


def test_unequal_steps_count_by_samples(ranks: Pool) -> None:
    inputs, targets = samples()
    workers = [net(), net()]
    optimizers = [optimizer_for(worker) for worker in workers]
    start = 0
    for steps in (STEPS, STEPS, (2, 1)):
        for worker, optimizer, count in zip(workers, optimizers, steps, strict=True):
            for _ in range(count):
                train_on(worker, optimizer, (inputs[start : start + 4], targets[start : start + 4]))
                start += 4
        mean = sum(count / sum(steps) * flat(worker) for count, worker in zip(steps, workers, strict=True))
        for worker in workers:
            torch.nn.utils.vector_to_parameters(mean.clone(), worker.parameters())  # type: ignore[union-attr]
    outcome = ranks(2, in_rounds, 1, None)
    for (own, agreed, ends), count in zip(outcome, STEPS, strict=True):
        torch.testing.assert_close(own, flat(workers[0]), rtol=1e-5, atol=1e-6)
        assert torch.equal(agreed, outcome[0][1])
        assert ends == ([False] * (count - 1) + [True]) * 2 + [False] * (count // 4 - 1) + [True]


def test_fragments_of_unequal_rounds_agree_to_the_bit(ranks: Pool) -> None:
    first, second = ranks(2, in_rounds, 3, 4)
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[1], flat(net()))


def with_chosen_rounds(workers: int) -> tuple[torch.Tensor, tuple[int, ...], int]:
    """Train with rounds that are chosen after some steps, of which the loader has cut the first ones without them."""
    model = net()
    dataset = TensorDataset(*[tensor.repeat(4, 1) for tensor in samples()])
    trimtab.local_steps(model)
    options = {"num_workers": workers, "prefetch_factor": 2} if workers else {}
    data = trimtab.loader(dataset, 8, shares=(2, 1), adjust=None, uneven="steps", **options)  # type: ignore[arg-type]
    optimizer = optimizer_for(model)
    for inputs, targets in data:
        data.weigh(F.mse_loss(model(inputs), targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with trimtab.agreed_weights(model, now=True):
        agreed = flat(model).clone()
    local = local_steps_of(model)
    assert local is not None
    assert local.worker is not None
    every, shares = local.worker.settings.every, data.shares
    local.close()
    return agreed, shares, every


@pytest.mark.parametrize("workers", [0, 1])
def test_rounds_may_be_chosen_while_a_loader_cuts_them(ranks: Pool, workers: int) -> None:
    first, second = ranks(2, with_chosen_rounds, workers)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0], flat(net()))
    assert sum(first[1]) == 2 * first[2] > 2
    assert first[1][0] > first[1][1]


def two_models() -> tuple[torch.Tensor, torch.Tensor]:
    """Both are trained on every batch; a third one, of an earlier training, stands in the middle of a round."""
    old, *models = [net(), net(), net()]
    for model in (old, *models):
        trimtab.local_steps(model, every=EVERY)
    inputs, targets = samples()
    old_optimizer = optimizer_for(old)
    for _ in range(2):
        F.mse_loss(old(inputs), targets).backward()
        old_optimizer.step()
    data = trimtab.loader(TensorDataset(inputs, targets), 8, shares=(2, 1), adjust=None, uneven="steps")
    optimizers = [optimizer_for(model) for model in models]
    for inputs, targets in data:
        for model, optimizer in zip(models, optimizers, strict=True):
            data.weigh(F.mse_loss(model(inputs), targets)).backward()
            optimizer.step()
            optimizer.zero_grad()
    agreed = []
    for model in models:
        with trimtab.agreed_weights(model, now=True):
            agreed.append(flat(model).clone())
    for model in (old, *models):
        local = local_steps_of(model)
        assert local is not None
        local.close()
    return agreed[0], agreed[1]


def test_rounds_of_two_models_are_those_of_the_loader(ranks: Pool) -> None:
    first, second = ranks(2, two_models)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], flat(net()))
