"""Scripts whose losses, models or loaders show that batches must be equal: they stay so, and one line says why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.control.shares.test_takeover import net, samples, taken_over, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from trimtab.control.shares.sampler import ShareSampler
from trimtab.control.shares.takeover import Takeover
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from tests.support.pool import Pool


class Contrastive(nn.Module):
    """Scores of each sample against all others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = net(), net()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.left(inputs) @ self.right(inputs).T
        return scores


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(samples(80))


def masked(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, torch.where(targets == 0, -100, targets))


def over_tokens(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    kept = targets != 0
    return (F.cross_entropy(logits, targets, reduction="none") * kept).sum() / kept.sum()


def matched(scores: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, torch.arange(len(scores)))


def twice(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    F.cross_entropy(logits, targets).backward(retain_graph=True)
    return F.cross_entropy(logits, targets)


def weighted(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets, weight=torch.arange(1.0, 5.0, dtype=torch.float64))


def scaled_by_rank(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(logits, targets)
    return loss / loss.detach()


def normalized(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    weights = (targets + 1).double()
    return (F.cross_entropy(logits, targets, reduction="none") * (weights / weights.sum())).sum()


def ranked(logits: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
    return F.softplus(logits[:, 0, None] - logits[None, :, 0]).mean()


def smoothed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, torch.where(targets == 0, -100, targets), label_smoothing=0.1)


def padded(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean over as many tokens as the longest sample of the batch has."""
    return F.pad(logits, (0, int(targets.max()) + 4 * dist.get_rank())).square().mean()


def over_tokens_by_a_factor(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    kept = targets != 0
    return (F.cross_entropy(logits, targets, reduction="none") * kept).sum() * (1 / int(kept.sum()))


def by_neighbors(logits: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
    return (logits - logits.roll(1, 0)).square().mean()


def balanced(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    weights = (targets + 1).double()
    return F.binary_cross_entropy_with_logits(logits[:, 0], (targets > 1).double(), weights / weights.mean())


def hidden(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets, reduction="sum") * torch.tensor(1 / len(targets))


def clamped() -> nn.Module:
    """Gradients are clipped value by value, before they are averaged."""
    model = net()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model


TRAPS: dict[str, dict[str, Any]] = {
    "(register_hook)": {"model": clamped},
    "targets are ignored": {"loss": smoothed},
    "differs from rank to rank": {"loss": scaled_by_rank},
    "normalized by those of their batch": {"loss": normalized},
    "weights of samples": {"loss": balanced},
    "may hold its number of samples": {"loss": hidden},
    "a term for each sample": {"loss": lambda x, _: sum(row.square().sum() for row in x)},
    "with each other": {"loss": ranked},
    "(RollBackward0": {"loss": lambda x, y: F.triplet_margin_loss(x, x.roll(1, 0), -x.detach())},
    "RollBackward0 along the batch": {"loss": by_neighbors},
    "is a mean over, or multiplied": {"loss": padded},
    "times a number that varies": {"loss": over_tokens_by_a_factor},
    "ignored": {"loss": masked},
    "varies": {"loss": over_tokens},
    "in-batch negatives": {"loss": matched, "model": Contrastive},
    "BatchNorm1d module.3": {"model": lambda: net(nn.BatchNorm1d(16))},
    "several backward passes": {"loss": twice},
    "weighted by class": {"loss": weighted},
}


def feed(loader: Any, takeover: Takeover) -> None:
    ddp = Ddp(net())
    takeover.watch(ddp)
    for inputs, targets in loader:
        F.cross_entropy(ddp(inputs), targets).backward()


def on_rank_traps() -> None:
    for words, case in TRAPS.items():
        case = dict(case)
        make = case.pop("model", None)
        with taken_over([11, 5]) as takeover:
            model = None if make is None else make().double()
            _, sizes, _ = train(takeover, size=128, epochs=1, model=model, **case)
        assert set(sizes) == {8}, (words, sizes)
        assert [words in text for text in takeover.texts] == [True], (words, takeover.texts)
    data = samples(80)
    for words, loader in {
        "IterableDataset": DataLoader(Stream(), batch_size=8),
        "RandomSampler": DataLoader(data, batch_size=8, shuffle=True),
        "BatchSampler": DataLoader(data, batch_sampler=[[0, 1], [2, 3]]),
        "3 ranks": DataLoader(data, batch_size=8, sampler=DistributedSampler(data, num_replicas=3, rank=0)),
    }.items():
        with taken_over() as takeover:
            feed(loader, takeover)
        assert [words in text or "a list" in text for text in takeover.texts] == [True], takeover.texts
    with taken_over([11, 5]) as takeover:
        both = [
            DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=seed)) for seed in (0, 1)
        ]
        feed((map(torch.cat, zip(*pair, strict=True)) for pair in zip(*both, strict=True)), takeover)
    (said,) = takeover.texts
    assert said.endswith("a step takes batches from several loaders, of 8 samples")
    own = DataLoader(data, batch_sampler=ShareSampler(80, batch_size=16, rank=dist.get_rank(), shares=(9, 7)))
    with taken_over() as takeover:
        feed(own, takeover)
    assert not takeover.texts, "trimtab.loader cuts by itself"
    with taken_over([11, 4]) as takeover, pytest.raises(TrimtabError, match="add up to 16"):
        train(takeover)
    assert takeover.texts, "nothing else is said about sizes that were refused"


def test_what_cannot_be_cut_stays_equal_and_is_named(ranks: Pool) -> None:
    ranks(2, on_rank_traps)
