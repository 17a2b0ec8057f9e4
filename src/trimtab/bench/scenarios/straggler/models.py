"""What the bench of stragglers trains: a GPT on text and a small ViT on images that are made up, with their batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.bench.scenarios.tp import KINDS as GPT_KINDS
from trimtab.bench.scenarios.tp import Gpt, Hidden
from trimtab.models.tasks import tokens
from trimtab.sharding import Attention

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.sharding.unit_kinds import UnitKind

SIZES: dict[str, dict[str, int]] = {
    "cpu": {"width": 320, "heads": 16, "layers": 2, "batch": 4, "length": 128},
    # Wide and short: over sockets an all-reduce must not hide the products.
    "cuda": {"width": 4096, "heads": 32, "layers": 2, "batch": 2, "length": 512},
}
_CLASSES, _CHANNELS, _PATCH = 10, 3, 4


class Look(nn.Module):
    """Attention of every patch to every patch, with any number of heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Encode(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Look(width, heads)
        self.norm2, self.hidden = nn.LayerNorm(width), Hidden(width)

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.hidden(self.norm2(x))


class Vit(nn.Module):
    """Classes of square images of `patches` patches; gives the mean loss."""

    def __init__(self, width: int, heads: int, layers: int, patches: int) -> None:
        super().__init__()
        self.patch = nn.Linear(_CHANNELS * _PATCH * _PATCH, width)
        self.position = nn.Parameter(torch.randn(patches, width) * 0.02)
        self.layers = nn.ModuleList(Encode(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _CLASSES)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        x = self.patch(images) + self.position
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


KINDS: dict[type[nn.Module], UnitKind | Sequence[UnitKind]] = {
    **GPT_KINDS,
    Look: Attention(query="query", key="key", value="value", out="out"),
}


def make_model(spec: Mapping[str, Any]) -> nn.Module:
    kind = Gpt if spec["model"] == "gpt" else Vit
    return kind(spec["width"], spec["heads"], spec["layers"], _positions(spec))


def make_batch(spec: Mapping[str, Any], step: int, device: torch.device) -> Any:
    """The batch of a step, the same on every rank and whenever asked for."""
    if spec["model"] == "gpt":
        return tokens(spec["batch"], spec["length"], seed=0, step=step, rank=0).to(device)
    patches = _positions(spec)
    count = spec["batch"] * spec["length"] // patches
    shape = (patches, _CHANNELS * _PATCH * _PATCH)
    typical = torch.randn(_CLASSES, *shape, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(_CLASSES, (count,), generator=generator)
    images = typical[labels] * 0.3 + torch.randn(count, *shape, generator=generator)
    return images.to(device), labels.to(device)


def _positions(spec: Mapping[str, Any]) -> int:
    return int(spec["length"]) if spec["model"] == "gpt" else 64
