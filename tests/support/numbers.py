"""A dataset whose samples tell their own index."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset


class Numbers(Dataset[torch.Tensor]):
    """Sample i is the number i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])
