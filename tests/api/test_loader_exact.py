"""`trimtab.loader` on real DDP jobs: the same training as on one device, however uneven the shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.utils.data import TensorDataset

import trimtab
from trimtab.api.loader import loader
from trimtab.codec import Block

if TYPE_CHECKING:
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
