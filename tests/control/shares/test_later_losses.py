"""A loss that becomes another one while batches are uneven, and loaders that are used side by side or by turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.control.shares.test_takeover import net, samples, taken_over
from tests.control.shares.test_trained_models import OWN, divided, wrapped
from torch.utils.data import DataLoader

from trimtab.control.shares.sum_or_mean import CHANGED
from trimtab.control.shares.takeover import Takeover

if TYPE_CHECKING:
    from tests.support.pool import Pool

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def masked(scores: torch.Tensor, targets: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return (F.cross_entropy(scores, targets, reduction="none") * kept).sum() / kept.sum()


def contrastive(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores @ scores.T, torch.arange(len(targets)))


LATER: dict[str, tuple[Loss, Loss]] = {
    "divided by a number that varies": (
        lambda x, y: masked(x, y, torch.ones_like(y)),
        lambda x, y: masked(x, y, y != 0),
    ),
    CHANGED: (F.cross_entropy, lambda x, y: F.cross_entropy(x, y, reduction="sum")),
    "partly a mean and partly a sum": (
        F.cross_entropy,
        lambda x, y: F.cross_entropy(x, y) + x.square().sum(),
    ),
    "in-batch negatives": (F.cross_entropy, contrastive),
}


def train(takeover: Takeover, first: Loss, later: Loss, change: int) -> list[int]:
    """The other loss begins after this many batches. Returns the sizes of this rank's batches."""
    ddp = wrapped(takeover, net())
    sizes: list[int] = []
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for inputs, targets in divided(256):
        loss = first if len(sizes) < change else later
        loss(ddp(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(len(inputs))
    return sizes


def on_rank_later() -> None:
    own = OWN[dist.get_rank()]
    for words, (first, later) in LATER.items():
        with taken_over(OWN) as takeover:
            sizes = train(takeover, first, later, 6)
        assert set(sizes[:3]) == set(sizes[-4:]) == {8}, (words, sizes)
        assert set(sizes[3:6]) == {own}
        assert [text for text in takeover.texts if words in text], takeover.texts


def on_rank_first() -> None:
    """Values beside the batch, as many as an equal one has: the first uneven step shows it."""
    noise = torch.randn(8, 8, dtype=torch.float64)
    with taken_over(OWN) as takeover:
        ddp = wrapped(takeover, net())
        sizes = []
        for inputs, targets in divided(128):
            (F.cross_entropy(ddp(inputs), targets) + ddp(noise).square().mean()).backward()
            torch.optim.SGD(ddp.parameters(), lr=0.01).step()
            sizes.append(len(inputs))
    assert sizes == [8] * 3 + [OWN[dist.get_rank()]] * 2 + [8] * 3, "the next batch had been taken already"
    assert any("is not a mean over the samples" in text for text in takeover.texts)


def test_a_loss_that_becomes_another_one_gets_equal_batches_again(ranks: Pool) -> None:
    ranks(2, on_rank_later)


def test_the_first_uneven_step_is_looked_at_by_all_ranks(ranks: Pool) -> None:
    ranks(2, on_rank_first)


def on_rank_loaders() -> None:
    beside = DataLoader(samples(80), batch_size=8, shuffle=True)
    with taken_over(OWN) as takeover:
        ddp, sizes = wrapped(takeover, net()), []
        for (extra, _), (inputs, targets) in zip(beside, divided(), strict=False):
            (F.cross_entropy(ddp(inputs), targets) + ddp(extra).square().mean()).backward()
            sizes.append(len(inputs))
    assert set(sizes) == {8}
    assert [text.endswith("a loader that is not divided among ranks") for text in takeover.texts] == [True]
    with taken_over(OWN) as takeover:
        ddp, loaders = wrapped(takeover, net()), [divided(seed=seed) for seed in (0, 1)]
        sizes = []
        iterators = [iter(loader) for loader in loaders]
        for step in range(10):
            inputs, targets = next(iterators[step % 2])
            F.cross_entropy(ddp(inputs), targets).backward()
            sizes.append(len(inputs))
    assert set(sizes) == {8}
    assert [text.endswith("from several loaders by turns") for text in takeover.texts] == [True]


def test_loaders_beside_and_by_turns_are_named(ranks: Pool) -> None:
    ranks(2, on_rank_loaders)
