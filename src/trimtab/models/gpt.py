"""The project's own GPT: a small byte-level language model of ordinary torch layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

BYTES = 256


class TransformerLayer(nn.Module):
    """Attention, then an MLP four times as wide, each with a residual connection.

    The forward pass takes any number of heads, so that a tensor-parallel rank can hold a part of them.
    """

    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.head_dim, self.causal = width // heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return y


class Gpt(nn.Module):
    """A byte-level language model; its forward pass returns the mean loss of the next byte."""

    def __init__(self, *, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerLayer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deeper = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if deeper else 0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text[:, :-1]) + self.places.weight[: text.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
