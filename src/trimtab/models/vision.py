"""Small image classifiers; their forward pass returns the mean loss of a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trimtab.models.gpt import TransformerLayer


class ConvNet(nn.Module):
    """Two convolutions and a linear head, for 8 x 8 gray images of ten classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.head = nn.Linear(2 * width * 16, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.gelu(self.conv2(F.gelu(self.conv1(images)))), 2)
        return F.cross_entropy(self.head(x.flatten(1)), labels)


class PatchTransformer(nn.Module):
    """A small ViT over images that are already cut into patches."""

    def __init__(
        self, *, width: int, layers: int, heads: int, patches: int, patch_size: int, classes: int
    ) -> None:
        super().__init__()
        self.patch = nn.Linear(patch_size, width)
        self.position = nn.Parameter(torch.randn(patches, width) * 0.02)
        self.blocks = nn.ModuleList(TransformerLayer(width, heads, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patch(images) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)
