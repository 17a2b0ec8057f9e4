"""One script, several models: each is looked at before its batches are cut."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.control.shares.test_takeover import net, read_ahead, samples, taken_over
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.utils.data import DataLoader, DistributedSampler

from trimtab.planning.shares.batch import Adjust
from trimtab.run_settings import own_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.pool import Pool

    from trimtab.control.shares.takeover import Takeover

OWN = (11, 5)


def wrapped(takeover: Takeover | None, model: nn.Module) -> Ddp:
    ddp = Ddp(model)
    if takeover is not None:
        takeover.watch(ddp)
    return ddp


def divided(size: int = 80, batch: int = 8, seed: int = 0) -> Any:
    data = samples(size)
    sampler: Any = DistributedSampler(data, seed=seed)
    return DataLoader(data, batch_size=batch, sampler=sampler)


def train(loader: Any, *models: Ddp) -> list[int]:
    """Steps of the sum of the models. Returns the sizes of this rank's batches."""
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()], lr=0.01)
    sizes = []
    for inputs, targets in loader:
        outputs = torch.stack([model(inputs) for model in models]).sum(0)
        F.cross_entropy(outputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(len(inputs))
    return sizes


def values(models: list[Ddp]) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


def one_after_another(takeover: Takeover | None) -> tuple[torch.Tensor, list[list[int]]]:
    """Models that are made before and between trainings, with one loader and with new ones."""
    loader, models, sizes = divided(), [], []
    early = wrapped(takeover, net())
    for model in (net(), net(nn.BatchNorm1d(16).double())):
        models.append(wrapped(takeover, model))
        sizes.append(train(loader, models[-1]))
    sizes.append(train(divided(), early))
    pair = [wrapped(takeover, net(nn.BatchNorm1d(16).double())), wrapped(takeover, net())]
    sizes.append(train(loader, *pair))
    return values([*models, early, *pair]), sizes


def on_rank_models() -> None:
    own = OWN[dist.get_rank()]
    plain, _ = one_after_another(None)
    with taken_over(OWN) as takeover:
        cut, sizes = one_after_another(takeover)
        assert takeover._decided
        with own_steps():
            wrapped(takeover, net())
        assert takeover._decided, "a copy that trimtab measures is no model of the script"
    assert (cut - plain).abs().max() < 1e-10
    uneven = [8] * 3 + [own] * 2
    assert sizes == [uneven, [8] * 5, uneven, [8] * 5], sizes
    assert sum("BatchNorm1d" in text for text in takeover.texts) == 1


class Slow(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            time.sleep(0.01 * len(inputs))
        return inputs


def on_rank_speeds() -> None:
    """Shares follow speeds for a second model, too, from those of the first on; and with another global batch."""
    plain = wrapped(None, net())
    for loader in (divided(240), divided(240, 4)):
        train(loader, plain)
    with taken_over(None, Adjust(window=3)) as takeover:
        first = train(divided(240), wrapped(takeover, net(Slow())))
        model = wrapped(takeover, net(Slow()))
        second = train(divided(240), model)
        third = train(divided(240, 4), model)
    assert len(set(first)) > 1
    assert second[:3] == [8] * 3
    assert (second[4] > 8) == (dist.get_rank() == 0), second
    assert third[:3] == [4] * 3
    assert (third[-1] > 4) == (dist.get_rank() == 0), third
    assert takeover.shares is not None
    assert sum(takeover.shares) == 8
    assert (values([model]) - values([plain])).abs().max() < 1e-10


def on_rank_loaders() -> None:
    """Loaders of unlike batches: in one step, and one after another."""
    for together in (True, False):
        with taken_over(OWN) as takeover:
            ddp = wrapped(takeover, net())
            first, other = divided(), divided(40, 4)
            if together:
                pairs = zip(first, other, strict=True)
                sizes = train((map(torch.cat, zip(*pair, strict=True)) for pair in pairs), ddp)
                assert set(sizes) == {12}
                words = "a step takes batches from several loaders, of 4 and 8 samples"
            else:
                assert set(train(other, wrapped(None, net()))) == {4}, "nothing of ours trains there"
                train(first, ddp)
                assert set(train(other, ddp)) == {4}
                assert OWN[dist.get_rank()] in train(first, ddp), "and back"
                words = "a step of this loader has 8 samples, not the 16 of 11,5"
        assert any(words in text for text in takeover.texts), takeover.texts


def test_each_model_is_looked_at(ranks: Pool) -> None:
    ranks(2, on_rank_models)


def test_shares_of_a_second_model_follow_speeds(ranks: Pool) -> None:
    ranks(2, on_rank_speeds)


def test_loaders_of_unlike_batches_are_named(ranks: Pool) -> None:
    ranks(2, on_rank_loaders)


class Running(nn.Module):
    """Normalizes by a running mean of its inputs."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        self.net = net()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * inputs.detach().mean(0))
        scores: torch.Tensor = self.net(inputs - self.mean)
        return scores


class Standardizes(nn.Module):
    """Calls a model with inputs that were standardized in their batch, as scripts do themselves."""

    def __init__(self, model: Ddp, prepare: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.prepare = model, prepare

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.model(self.prepare(inputs))
        return scores


class Attacked(nn.Module):
    """Calls a model with inputs that were moved along the gradient of its mean score, or of the sum."""

    def __init__(self, model: Ddp, reduce: Any) -> None:
        super().__init__()
        self.model, self.reduce = model, reduce

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.detach().requires_grad_()
        (along,) = torch.autograd.grad(self.reduce(self.model.module(inputs).square()), inputs)
        scores: torch.Tensor = self.model(inputs.detach() + along)
        return scores


def on_rank_statistics() -> None:
    own = OWN[dist.get_rank()]
    with taken_over(OWN) as takeover:
        assert set(train(divided(), wrapped(takeover, Running()))) == {8}
    assert any("statistics of each rank's own samples in module.mean" in said for said in takeover.texts)
    preparations: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda inputs: (inputs - inputs.mean(0)) / inputs.std(0),
        lambda inputs: inputs / inputs.std(),
    ]
    for prepare in preparations:
        with taken_over(OWN) as takeover:
            outer: Any = Standardizes(wrapped(takeover, net()), prepare)
            assert set(train(divided(), outer)) == {8}
        assert any("standardized by those of their batch" in said for said in takeover.texts)
    for reduce in (torch.mean, torch.sum):
        with taken_over(OWN) as takeover:
            outer = Attacked(wrapped(takeover, net()), reduce)
            assert (own in train(divided(), outer)) == (reduce is torch.sum)
        assert any("gradients of a mean" in said for said in takeover.texts) == (reduce is torch.mean)
    with taken_over(OWN) as takeover:  # its vectors change in every step, and depend on weights only
        normed = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)).double()
        assert own in train(divided(), wrapped(takeover, normed))


def test_statistics_of_a_ranks_own_samples(ranks: Pool) -> None:
    ranks(2, on_rank_statistics)


def on_rank_read_ahead() -> None:
    """Accelerate's loaders are a batch ahead, which is not that of a second backward pass, as those of GANs."""
    own = OWN[dist.get_rank()]
    for second_in_every in (0, 1, 2):
        with taken_over(OWN) as takeover:
            loader, model = divided(160), wrapped(takeover, net())
            source: Any = takeover.source_of(loader)
            source.ahead = True
            sizes = []
            for _epoch in range(2):
                for index, (inputs, targets) in enumerate(read_ahead(loader)):
                    F.cross_entropy(model(inputs), targets).backward()
                    if second_in_every and index % second_in_every == second_in_every - 1:
                        model(inputs).square().mean().backward()
                    sizes.append(len(inputs))
            assert (own in sizes) == (second_in_every == 0), sizes
        said = any("a batch has several backward passes" in text for text in takeover.texts)
        assert said == (second_in_every > 0)


def test_a_second_backward_pass_does_not_take_a_batch_that_was_read_ahead(ranks: Pool) -> None:
    ranks(2, on_rank_read_ahead)


def late_mode(takeover: Takeover | None) -> tuple[torch.Tensor, list[int]]:
    """Evaluates after each epoch, and is back in training mode with the first batch only, as the Trainer."""
    loader, model = divided(160), wrapped(takeover, net())
    optimizer, sizes = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _epoch in range(3):
        for inputs, targets in loader:
            model.train()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            sizes.append(len(inputs))
        model.eval()
    return values([model]), sizes


def on_rank_late_mode() -> None:
    expected, _ = late_mode(None)
    with taken_over(OWN) as takeover:
        found, sizes = late_mode(takeover)
    assert (found - expected).abs().max() < 1e-10
    own, epoch = OWN[dist.get_rank()], len(sizes) // 3
    assert sizes[:3] == [sum(OWN) // 2] * 3, "three batches are looked at first"
    for start in (epoch, 2 * epoch):  # cut again after the first batch
        assert sizes[start] == sum(OWN) // 2
        assert set(sizes[start + 1 : start + epoch]) == {own}


def test_an_epoch_that_begins_in_evaluation_mode(ranks: Pool) -> None:
    ranks(2, on_rank_late_mode)
