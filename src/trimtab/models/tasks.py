"""What the benches train: a model with its data, by task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from trimtab.models.data import Noise, NoisyPatches, Passages, digits, draw
from trimtab.models.gpt import Gpt, TransformerLayer
from trimtab.models.spec import LossOnly

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model and its data, the same every time they are made."""

    model: nn.Module
    """On its device; its forward pass returns the mean loss of a batch."""

    train: Dataset[Any]
    held_out: Dataset[Any]
    samples: int
    """Samples of a rank in a step when all ranks have the same number."""

    device: torch.device = CPU

    def batch(
        self, samples: int | None = None, *, step: int, rank: int = 0, seed: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """The model's arguments: a rank's random samples of one step, the same on every call."""
        return self.to_device(draw(self.train, samples or self.samples, step=step, rank=rank, seed=seed))

    def to_device(self, batch: Any) -> tuple[torch.Tensor, ...]:
        """What a data loader gave, as the model's arguments."""
        parts = (batch,) if isinstance(batch, torch.Tensor) else batch
        return tuple(part.to(self.device) for part in parts)

    def held_out_loss(self, model: nn.Module) -> float:
        """Mean loss of a trained model, perhaps sharded, on samples that were not trained on."""
        with torch.no_grad():
            losses = [
                model(*self.to_device(batch)).float()
                for batch in DataLoader(self.held_out, 32, drop_last=len(self.held_out) > 32)  # type: ignore[arg-type]
            ]
        return float(torch.stack(losses).mean())


def gpt(
    *,
    width: int,
    layers: int,
    heads: int,
    context: int,
    samples: int,
    held_out: int = 64,
    device: torch.device = CPU,
    seed: int = 0,
) -> Task:
    """The project's own GPT on Python source."""
    torch.manual_seed(seed)
    with device:
        model = Gpt(width=width, layers=layers, heads=heads, context=context)
    return _text(model, context + 1, samples, held_out, device)


def gpt2(samples: int, device: torch.device, *, length: int = 512, held_out: int = 64) -> Task:
    """GPT-2 small, without dropout, on Python source as bytes: `length` of them in a sequence."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    return _text(LossOnly(model).to(device), length, samples, held_out, device)


def llama(
    samples: int,
    device: torch.device = CPU,
    *,
    width: int = 96,
    hidden: int = 256,
    layers: int = 2,
    heads: int = 4,
    length: int = 64,
) -> Task:
    """A Llama of `transformers` (RMSNorm, gated MLP, two heads to a key) on Python source as bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=length,
        use_cache=False,
    )
    return _text(LossOnly(LlamaForCausalLM(config)).to(device), length, samples, 64, device)


def vit(samples: int, device: torch.device) -> Task:
    """ViT-B on noise: its speed is of interest, not what it learns."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config: Any = ViTConfig()
    config.num_labels = 1000
    model = LossOnly(ViTForImageClassification(config)).to(device)
    return _on_noise(model, Noise((3, 224, 224), 1000, device), samples, device)


def bert(
    samples: int,
    device: torch.device,
    *,
    width: int = 256,
    layers: int = 4,
    heads: int = 4,
    length: int = 128,
    dropout: float = 0.1,
) -> Task:
    """A BERT of `transformers` on random tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=2000,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=max(512, length),
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = LossOnly(BertForSequenceClassification(config)).to(device)
    return _on_noise(model, Noise((length,), 2, device, vocabulary=2000), samples, device)


def patches(*, width: int, layers: int, heads: int, samples: int, device: torch.device) -> Task:
    """A small ViT on made-up images."""
    torch.manual_seed(0)
    data = NoisyPatches()
    with device:
        model = PatchTransformer(
            width=width,
            layers=layers,
            heads=heads,
            patches=data.patches,
            patch_size=data.patch_size,
            classes=data.classes,
        )
    return _on_noise(model, data, samples, device)


def convnet(width: int, samples: int, device: torch.device) -> Task:
    """A convolutional network on scanned digits."""
    torch.manual_seed(0)
    return _on_digits(ConvNet(width).to(device), samples, device)


def resnet(samples: int, device: torch.device = CPU) -> Task:
    """A small ResNet of `transformers` on scanned digits."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config: Any = ResNetConfig(
        num_channels=1, embedding_size=32, hidden_sizes=[32, 64, 128], depths=[1, 1, 1], layer_type="basic"
    )
    config.num_labels = 10
    return _on_digits(LossOnly(ResNetForImageClassification(config)).to(device), samples, device)


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


def _text(model: nn.Module, length: int, samples: int, held_out: int, device: torch.device) -> Task:
    passages = Passages(length)
    every = len(passages) // held_out
    chosen = range(0, held_out * every, every)  # from all over the text
    rest = sorted(set(range(len(passages))) - set(chosen))
    return Task(
        model=model,
        train=Subset(passages, rest),
        held_out=Subset(passages, chosen),
        samples=samples,
        device=device,
    )


def _on_noise(model: nn.Module, data: Dataset[Any], samples: int, device: torch.device) -> Task:
    return Task(model=model, train=data, held_out=Subset(data, range(64)), samples=samples, device=device)


def _on_digits(model: nn.Module, samples: int, device: torch.device) -> Task:
    data = digits()
    return Task(
        model=model,
        train=Subset(data, range(1437)),
        held_out=Subset(data, range(1437, len(data))),
        samples=samples,
        device=device,
    )
