"""The GPT of the step benches, and real text to feed it: the Python standard library's own source."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

BYTES = 256


class Block(nn.Module):
    """Attention, then a four times wider layer, each beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return y


class Gpt(nn.Module):
    """A byte-level language model; the loss of each byte given those before it."""

    def __init__(self, *, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
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


def text_bytes(count: int) -> torch.Tensor:
    """So many bytes of Python source, as int64."""
    parts, have = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        parts.append(path.read_bytes())
        have += len(parts[-1])
        if have >= count:
            break
    data = b"".join(parts)
    repeated = data * (-(-count // len(data)))
    return torch.frombuffer(bytearray(repeated[:count]), dtype=torch.uint8).long()


def batch_of(text: torch.Tensor, step: int, sequences: int, context: int) -> torch.Tensor:
    """A step's sequences, each of `context` bytes and the one after them; the same for every run."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - context - 1, (sequences,), generator=generator)
    return torch.stack([text[start : start + context + 1] for start in starts.tolist()])
