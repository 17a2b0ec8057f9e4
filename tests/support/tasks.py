"""A small task for tests of bits: one large and one small layer."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from trimtab.models.tasks import Task


class _Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.small(self.large(inputs)).square().mean()
        return loss


def a_task() -> Task:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 64, generator=torch.Generator().manual_seed(0)))
    return Task(model=_Squares(), train=data, held_out=data, samples=8)
