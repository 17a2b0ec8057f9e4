"""What the bench of batch shares trains: a dataset, a model, and the mean loss of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from trimtab.models.tasks import Gpt, text, workload

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, kw_only=True)
class Task:
    """One thing to learn, the same whenever it is made."""

    model: nn.Module
    train: Dataset[Any]
    held_out: Dataset[Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    """Mean over the samples of a batch."""

    each: int
    """Samples a rank has in a step when all have the same."""


class Passages(Dataset[torch.Tensor]):
    """The standard library's text in passages of one length."""

    def __init__(self, length: int) -> None:
        self._bytes = text()
        self._length = length

    def __len__(self) -> int:
        return len(self._bytes) // self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._bytes[index * self._length : (index + 1) * self._length].long()


class ConvNet(nn.Module):
    """Logits of 8 x 8 grey images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.head = nn.Linear(2 * width * 16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.gelu(self.conv2(F.gelu(self.conv1(images)))), 2)
        logits: torch.Tensor = self.head(x.flatten(1))
        return logits


def make_task(name: str, device: torch.device) -> Task:
    """`gpt`, `digits`, or on a GPU `gpt2`."""
    torch.manual_seed(0)
    if name == "digits":
        return _digits(device)
    length = 65 if name == "gpt" else 512
    passages = Passages(length)
    some = len(passages) - 64
    if name == "gpt":
        model: nn.Module = Gpt(width=128, layers=2, heads=4, context=64).to(device)
    else:
        model = workload("gpt2", device)[0]

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(batch) if name == "gpt" else model(batch, batch)
        return found

    return Task(
        model=model,
        train=Subset(passages, range(some)),
        held_out=Subset(passages, range(some, len(passages))),
        loss=loss,
        each=64 if name == "gpt" else 16,
    )


def _digits(device: torch.device) -> Task:
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    everything = TensorDataset(images[order], torch.tensor(labels)[order].long())

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Task(
        model=ConvNet(128).to(device),
        train=Subset(everything, range(1437)),
        held_out=Subset(everything, range(1437, len(everything))),
        loss=loss,
        each=192,
    )
