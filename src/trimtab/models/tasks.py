"""What the benches train: a GPT on the Python standard library's text, and models of `transformers`."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from trimtab.errors import TrimtabError
from trimtab.random_bits import stream

if TYPE_CHECKING:
    from collections.abc import Callable


MODELS = ("gpt25m", "gpt2", "vit")


class Gpt(nn.Module):
    """A decoder over bytes made of torch's own layers; gives the mean loss of the next byte."""

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


@cache
def text() -> torch.Tensor:
    """The standard library's own source, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def tokens(batch: int, length: int, *, seed: int, step: int, rank: int) -> torch.Tensor:
    """A rank's batch of one step: `length` + 1 bytes from random places, the same whenever asked for."""
    # Hashed: torch's generator on the CPU looks at the low 32 bits of a seed only.
    generator = torch.Generator().manual_seed(stream(seed, step, rank, 0) & 0xFFFFFFFF)
    starts = torch.randint(len(text()) - length - 1, (batch,), generator=generator)
    return torch.stack([text()[start : start + length + 1] for start in starts.tolist()]).long()


def workload(name: str, device: torch.device) -> tuple[nn.Module, Callable[[int, int], Any]]:
    """A model whose forward gives its loss, and its inputs as a function of (step, rank)."""
    require_model(name)
    if name == "gpt25m":
        model: nn.Module = Gpt(width=512, layers=8, heads=8, context=128)
        return model.to(device), lambda step, rank: tokens(1, 128, seed=0, step=step, rank=rank).to(device)
    return _gpt2(device) if name == "gpt2" else _vit(device)


def require_model(name: str) -> None:
    """Refuse a name that `workload` does not know."""
    if name not in MODELS:
        raise TrimtabError(f"there is no model {name!r}; choose {', '.join(MODELS)}")


class _Loss(nn.Module):
    """A `transformers` model that gives its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(inputs, labels=labels).loss
        return loss


def _gpt2(device: torch.device) -> tuple[nn.Module, Callable[[int, int], Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))

    def inputs(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = tokens(8, 511, seed=0, step=step, rank=rank).to(device)
        return ids, ids

    return _Loss(model).to(device), inputs


def _vit(device: torch.device) -> tuple[nn.Module, Callable[[int, int], Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    config: Any = ViTConfig()
    config.num_labels = 1000
    model: nn.Module = ViTForImageClassification(config)

    def inputs(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(device).manual_seed((step << 10) + rank)
        images = torch.randn(32, 3, 224, 224, generator=generator, device=device)
        return images, torch.randint(1000, (32,), generator=generator, device=device)

    return _Loss(model).to(device), inputs
