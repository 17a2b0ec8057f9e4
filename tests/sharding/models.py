"""Tiny models of every kind that can be converted, in double precision, with a batch for each."""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH, BATCH = 24, 6, 2, 17, 7, 3
KINDS = ("gpt", "gpt2", "llama", "vit", "sequential")


class Layer(nn.Module):
    """Attention and MLP in one module, as in the project's own GPT."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.head_width = WIDTH // HEADS
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.hidden_dropout = nn.Dropout(p)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Any:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, self.head_width))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.projection(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(self.hidden_dropout(F.gelu(self.up(self.norm2(x))))))


class GPT(nn.Module):
    """The project's own GPT in small, with a head tied to the embedding."""

    def __init__(self, p: float = 0.0, layers: int = LAYERS) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Layer(p) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Stack(nn.Module):
    """Residual MLPs written as `nn.Sequential`, without biases."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 13, bias=False),
                nn.Tanh(),
                nn.Dropout(p),
                nn.Linear(13, WIDTH),
                nn.Dropout(p),
            )
            for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@contextmanager
def heads(count: int) -> Iterator[None]:
    """Models made inside have that many heads."""
    global HEADS
    before, HEADS = HEADS, count
    try:
        yield
    finally:
        HEADS = before


def make(kind: str, seed: int = 0, p: float = 0.0) -> nn.Module:
    """The model of a kind; the seed sets every parameter, biases included."""
    torch.manual_seed(seed)
    model = _plain(kind, p).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def _plain(kind: str, p: float) -> nn.Module:
    if kind in ("gpt", "shallow"):
        return GPT(p, LAYERS if kind == "gpt" else 1)
    if kind == "sequential":
        return Stack(p)
    model: nn.Module = _from_transformers(kind, p)
    return model


def _from_transformers(kind: str, p: float) -> Any:
    transformers: Any = import_module("transformers")
    attention = "eager" if kind == "vit" else "sdpa"
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=WIDTH, n_head=HEADS, n_layer=LAYERS, vocab_size=VOCABULARY, n_positions=LENGTH,
            resid_pdrop=p, embd_pdrop=p, attn_pdrop=p, attn_implementation=attention, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    if kind in ("llama", "mistral", "qwen2"):
        name = kind.capitalize()
        config = getattr(transformers, f"{name}Config")(
            hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, intermediate_size=34,
            num_hidden_layers=LAYERS, vocab_size=VOCABULARY, attention_dropout=p, attn_implementation=attention,
            use_cache=False,
        )  # fmt: skip
        return getattr(transformers, f"{name}ForCausalLM")(config)
    assert kind == "vit", kind
    config = transformers.ViTConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=34, num_hidden_layers=LAYERS, image_size=8,
        patch_size=4, num_channels=1, num_labels=5, hidden_dropout_prob=p, attention_probs_dropout_prob=p,
        attn_implementation=attention,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def loss_of(kind: str, model: nn.Module, step: int) -> Tensor:
    """The loss on the batch of that step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    if kind == "sequential":
        loss = model(torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64))
    elif kind in ("gpt", "shallow"):
        loss = model(tokens)
    elif kind == "vit":
        pixels = torch.randn(BATCH, 1, 8, 8, generator=generator, dtype=torch.float64)
        loss = model(pixel_values=pixels, labels=tokens[:, 0] % 5).loss
    else:
        loss = model(input_ids=tokens, labels=tokens).loss
    assert isinstance(loss, Tensor)
    return loss
