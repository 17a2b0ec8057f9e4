"""Small models of every sort that capture has to understand, and their batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from trimtab.models.gpt import Gpt

if TYPE_CHECKING:
    from collections.abc import Callable


class ConvNet(nn.Module):
    """Convolutions (one grouped), batch norms, a pool and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, groups=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), y)


class TorchGpt(nn.Module):
    """A decoder over bytes made of torch's own transformer layers."""

    def __init__(self, *, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], device=tokens.device)
        x = self.token(inputs) + self.position[: inputs.shape[1]]
        logits = self.head(self.body(x, mask=mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Peeks(nn.Module):
    """Looks at a value, which no tensor without values has."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.one(x) if x.sum() > 0 else self.two(x)
        return y


class Places(nn.Module):
    """A layer that is applied to a table of its own, as for relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.randn(32, 64)), nn.Linear(64, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x * self.layer(self.table)
        return y


class Loss(nn.Module):
    """A transformers model that gives its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(inputs, labels=labels).loss
        return loss


def _transformer(name: str) -> nn.Module:
    import transformers as t

    config: Any
    if name == "gpt2":
        config = t.GPT2Config(n_layer=3, n_embd=64, n_head=4, vocab_size=500, n_positions=64)
        return t.GPT2LMHeadModel(config)
    sizes: dict[str, Any] = {
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
    }
    if name == "llama":
        config = t.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=500, use_cache=False)
        return t.LlamaForCausalLM(config)
    if name == "bert":
        return t.BertForSequenceClassification(t.BertConfig(**sizes, vocab_size=500))
    if name == "vit":
        return t.ViTForImageClassification(t.ViTConfig(**sizes, image_size=32, patch_size=8))
    config = t.ResNetConfig(depths=[1, 2, 1, 1], hidden_sizes=[32, 64, 64, 64], embedding_size=16)
    return t.ResNetForImageClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: Gpt(width=64, layers=3, heads=4, context=16),
    "torch_gpt": lambda: TorchGpt(width=64, layers=3, heads=4, context=16),
    "conv": ConvNet,
    "gpt2": lambda: Loss(_transformer("gpt2")),
    "llama": lambda: Loss(_transformer("llama")),
    "bert": lambda: Loss(_transformer("bert")),
    "vit": lambda: Loss(_transformer("vit")),
    "resnet": lambda: Loss(_transformer("resnet")),
}


def batch_for(name: str, size: int) -> tuple[torch.Tensor, ...]:
    """A batch that a model of `MODELS` takes."""
    generator = torch.Generator().manual_seed(size)
    if name in ("gpt", "torch_gpt"):
        return (torch.randint(256, (size, 17), generator=generator),)
    if name in ("gpt2", "llama"):
        ids = torch.randint(500, (size, 32), generator=generator)
        return ids, ids
    if name == "bert":
        return torch.randint(500, (size, 32), generator=generator), torch.randint(
            2, (size,), generator=generator
        )
    images = torch.randn(size, 3, 32, 32, generator=generator)
    return images, torch.randint(2, (size,), generator=generator)
