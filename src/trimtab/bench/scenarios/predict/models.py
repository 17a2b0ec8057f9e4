"""What the bench of the predictor trains, at any number of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from trimtab.bench.scenarios.shares.tasks import ConvNet
from trimtab.models.gpt import Gpt, batch_of, text_bytes
from trimtab.models.spec import LossOnly

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model whose forward gives its loss, and its batches."""

    model: nn.Module
    batch: Callable[[int], tuple[torch.Tensor, ...]]
    """The model's arguments for so many samples."""

    unit: int
    """Samples that shares are counted in."""


class Classifier(nn.Module):
    """The mean loss of a network's logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.network(images), labels)


def make_task(name: str, device: torch.device) -> Task:
    """`gpt`, `conv` or `bert`; on a GPU `gpt`, `gpt2` or `vit`, in sizes that suit one.

    Its batches are large enough there that the device is busy: where it waits for the host's launches, a step takes
    as long as Python does, whatever the plan.
    """
    torch.manual_seed(0)
    large = device.type == "cuda"
    if name == "gpt":
        return (
            _gpt(device, width=1536, layers=8, context=512, unit=4)
            if large
            else _gpt(device, width=256, layers=4, context=128, unit=1)
        )
    if name == "conv":
        return _conv(device)
    if name == "bert":
        return _bert(device)
    return _gpt2(device) if name == "gpt2" else _vit(device)


def _gpt(device: torch.device, *, width: int, layers: int, context: int, unit: int) -> Task:
    text = text_bytes(1 << 18)
    model = Gpt(width=width, layers=layers, heads=width // 64, context=context).to(device)
    return Task(model=model, batch=lambda n: (batch_of(text, n, n, context).to(device),), unit=unit)


def _conv(device: torch.device) -> Task:
    def batch(n: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(n)
        images = torch.randn(n, 1, 8, 8, generator=generator)
        return images.to(device), torch.randint(10, (n,), generator=generator).to(device)

    return Task(model=Classifier(ConvNet(96)).to(device), batch=batch, unit=32)


def _bert(device: torch.device) -> Task:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=2000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    model = LossOnly(BertForSequenceClassification(config)).to(device)

    def batch(n: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(n)
        ids = torch.randint(2000, (n, 128), generator=generator)
        return ids.to(device), torch.randint(2, (n,), generator=generator).to(device)

    return Task(model=model, batch=batch, unit=1)


def _gpt2(device: torch.device) -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = LossOnly(GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))).to(device)
    text = text_bytes(1 << 18)

    def batch(n: int) -> tuple[torch.Tensor, ...]:
        ids = batch_of(text, n, n, 511).to(device)
        return ids, ids

    return Task(model=model, batch=batch, unit=5)


def _vit(device: torch.device) -> Task:
    from transformers import ViTConfig, ViTForImageClassification

    config: Any = ViTConfig()
    config.num_labels = 1000
    model = LossOnly(ViTForImageClassification(config)).to(device)

    def batch(n: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator(device).manual_seed(n)
        images = torch.randn(n, 3, 224, 224, generator=generator, device=device)
        return images, torch.randint(1000, (n,), generator=generator, device=device)

    return Task(model=model, batch=batch, unit=40)
