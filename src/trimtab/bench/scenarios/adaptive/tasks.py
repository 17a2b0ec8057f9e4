"""What the adaptive bench trains: a GPT on Python source, and a ResNet of `transformers` on scanned digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trimtab.models.tasks import Gpt, tokens
from trimtab.random_bits import stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

HELD_OUT = 999_999
"""Seed of the batches that every run is judged on."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model whose forward gives its loss, and its data."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int, int], tuple[torch.Tensor, ...]]
    """Of (seed, step, rank)."""

    held_out: Callable[[], list[tuple[torch.Tensor, ...]]]
    lr: float


def task(name: str) -> Task:
    """`gpt` or `resnet`."""
    return _gpt() if name == "gpt" else _resnet()


def _gpt() -> Task:
    return Task(
        build=lambda: Gpt(width=96, layers=2, heads=4, context=64),
        inputs=lambda seed, step, rank: (tokens(8, 64, seed=seed, step=step, rank=rank),),
        held_out=lambda: [(tokens(32, 64, seed=HELD_OUT, step=i, rank=0),) for i in range(8)],
        lr=0.1,
    )


def _resnet() -> Task:
    from sklearn.datasets import load_digits

    from trimtab.models.tasks import _Loss

    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    kept = len(images) * 3 // 4

    def build() -> nn.Module:
        from transformers import ResNetConfig, ResNetForImageClassification

        config: Any = ResNetConfig(
            num_channels=1,
            embedding_size=32,
            hidden_sizes=[32, 64, 128],
            depths=[1, 1, 1],
            layer_type="basic",
        )
        config.num_labels = 10
        return _Loss(ResNetForImageClassification(config))

    def inputs(seed: int, step: int, rank: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(stream(seed, step, rank, 0) & 0xFFFFFFFF)
        chosen = torch.randint(kept, (16,), generator=generator)
        return images[chosen], labels[chosen]

    return Task(build=build, inputs=inputs, held_out=lambda: [(images[kept:], labels[kept:])], lr=0.02)
