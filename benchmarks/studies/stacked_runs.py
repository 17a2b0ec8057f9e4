"""Small models of three kinds that train in many runs at once, each on several workers: their losses and gradients.

All parameters of a run are one row of a matrix. Those that the codec compresses come first, whole blocks of 1024 values
each, so that a row's first `coded` values are what travels in fewer bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from benchmarks.studies.stacked_vit import CLASSES, Size, images
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from trimtab.models.data import text
from trimtab.models.gpt import BYTES, Gpt
from trimtab.models.tasks import PatchTransformer
from trimtab.wire_format import MIN_NUMEL

MODELS = ("gpt", "vit", "llama")
HELD_OUT = 0.05
AT_ONCE = 84
"""Runs whose activations are in memory together."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the models and of a worker's batch."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    context: int = 64
    samples: int = 8
    held_out: int = 256
    images: int = 8192


TINY = Sizes(width=64, layers=1, heads=2, context=16, samples=2, held_out=8, images=64)


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight
        return scaled


class LlamaLayer(nn.Module):
    """Attention with rotary positions and two heads to a key, then a gated MLP; no biases."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)
        angles = torch.outer(
            torch.arange(context), 10_000.0 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        )
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            part.unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q(y), self.k(y), self.v(y))
        )
        q, k = self._turned(q), self._turned(k)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out

    def _turned(self, x: Tensor) -> Tensor:
        length = x.shape[2]
        cos, sin = self.cos[:length], self.sin[:length]  # type: ignore[index]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Llama(nn.Module):
    """A byte-level language model in Llama's style; its forward pass returns the mean loss of the next byte."""

    def __init__(self, *, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(LlamaLayer(width, heads, context) for _ in range(layers))
        self.norm, self.head = RmsNorm(width), nn.Linear(width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deeper = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if deeper else 0.02)

    def forward(self, passage: Tensor) -> Tensor:
        x = self.tokens(passage[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), passage[:, 1:].flatten())


class Runs:
    """Copies of one model, a row each, with the data they train on.

    Runs with the same seed start alike and get the same data, whatever else differs.
    """

    def __init__(self, model: str, sizes: Sizes, seeds: Sequence[int], device: torch.device) -> None:
        """`seeds` has the seed of the initial weights of every run."""
        self.device, self._sizes = device, sizes
        self._data = _Text(sizes, device) if model != "vit" else _Images(sizes, device)
        rows: dict[int, Tensor] = {}
        for seed in dict.fromkeys(seeds):
            torch.manual_seed(seed)
            self._module = _module(model, sizes)
            named = sorted(self._module.named_parameters(), key=lambda item: not _is_coded(item[1]))
            rows[seed] = torch.cat([parameter.detach().reshape(-1) for _, parameter in named])
        self.shapes = {name: parameter.shape for name, parameter in named}
        self.coded_shapes = {name: parameter.shape for name, parameter in named if _is_coded(parameter)}
        self.coded = sum(shape.numel() for shape in self.coded_shapes.values())
        assert all(shape.numel() % 1024 == 0 for shape in self.coded_shapes.values())
        self.decayed = self.coded
        """The first values of a row, the matrices, to which weight decay applies."""
        self.flat = torch.stack([rows[seed] for seed in seeds]).to(device)
        self._module = self._module.to(device).requires_grad_(False)
        self._names, self._numels = list(self.shapes), [shape.numel() for shape in self.shapes.values()]

    def gradients(
        self, weights: Tensor, step: int, data_seeds: Sequence[int], workers: int
    ) -> tuple[Tensor, Tensor]:
        """At these weights, (runs, values): every worker's gradient, (runs, workers, values), and its loss."""
        by_seed = {seed: self._data.batch(step, seed, workers) for seed in dict.fromkeys(data_seeds)}
        batch = tuple(
            torch.stack(parts) for parts in zip(*(by_seed[seed] for seed in data_seeds), strict=True)
        )
        one = grad_and_value(self._loss)
        every = vmap(vmap(one, in_dims=(None, 0)), in_dims=(0, 0))
        gradients = torch.empty(len(weights), workers, weights.shape[1], device=self.device)
        losses = torch.empty(len(weights), workers, device=self.device)
        with sdpa_kernel(SDPBackend.MATH):
            for start in range(0, len(weights), AT_ONCE):
                some = slice(start, start + AT_ONCE)
                gradients[some], losses[some] = every(weights[some], tuple(part[some] for part in batch))
        return gradients, losses

    @torch.no_grad()
    def held_out_losses(self, weights: Tensor) -> list[float]:
        """Of every run, on data that no run trains on."""
        with sdpa_kernel(SDPBackend.MATH):
            means = [
                torch.stack([self._loss(row, batch) for batch in self._data.held_out()]).mean()
                for row in weights
            ]
        return torch.stack(means).tolist()

    def _loss(self, row: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        parts = row.split(self._numels)
        named = {
            name: part.view(shape)
            for name, part, shape in zip(self._names, parts, self.shapes.values(), strict=True)
        }
        loss: Tensor = functional_call(self._module, named, batch)
        return loss


class _Text:
    """The standard library's source: batches from its first part, held-out passages from the rest."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        self._text = text().to(device)
        self._cut = int(len(self._text) * (1 - HELD_OUT))

    def batch(self, step: int, seed: int, workers: int) -> tuple[Tensor, ...]:
        starts = torch.randint(
            self._cut - self._sizes.context - 1,
            (workers, self._sizes.samples),
            generator=_generator(seed, step),
        )
        return (self._passages(starts),)

    def held_out(self) -> list[tuple[Tensor, ...]]:
        room = len(self._text) - self._cut - self._sizes.context - 1
        starts = self._cut + torch.arange(self._sizes.held_out) * (room // self._sizes.held_out)
        return [(self._passages(starts),)]

    def _passages(self, starts: Tensor) -> Tensor:
        places = starts[..., None] + torch.arange(self._sizes.context + 1)
        return self._text[places.to(self._device)].long()


class _Images:
    """Strokes of ten shapes among others, in patches."""

    patch, side = 4, 32

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self._sizes = sizes
        drawn = Size(
            width=0,
            layers=0,
            heads=0,
            head_dim=0,
            hidden=0,
            image=self.side,
            train=0,
            epochs=0,
            patch=self.patch,
        )
        self._train = tuple(part.to(device) for part in images(sizes.images, drawn, seed=2))
        self._held_out = tuple(part.to(device) for part in images(4 * sizes.held_out, drawn, seed=3))

    def batch(self, step: int, seed: int, workers: int) -> tuple[Tensor, ...]:
        chosen = torch.randint(
            self._sizes.images, (workers, self._sizes.samples), generator=_generator(seed, step)
        )
        return tuple(part[chosen.to(part.device)] for part in self._train)

    def held_out(self) -> list[tuple[Tensor, ...]]:
        return [self._held_out]


def rate(step: int, steps: int) -> float:
    """Of the highest learning rate: up in a tenth of the steps, then down like a cosine to a hundredth."""
    warm = max(steps // 10, 1)
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(steps - warm, 1)
    return 0.01 + 0.99 * 0.5 * (1 + float(torch.tensor(done * torch.pi).cos()))


def sgd(flat: Tensor, lr: Tensor) -> Callable[[Tensor, float], None]:
    """SGD with momentum on rows of parameters: a step by (gradients, factor of the rows' learning rates)."""
    velocity = torch.zeros_like(flat)

    def step(gradients: Tensor, factor: float) -> None:
        velocity.mul_(0.9).add_(gradients)
        flat.sub_(velocity * (lr * factor)[:, None])

    return step


def adamw(flat: Tensor, lr: Tensor, decayed: int) -> Callable[[Tensor, float], None]:
    """AdamW with torch's own settings; the first `decayed` values of a row decay."""
    first, second = torch.zeros_like(flat), torch.zeros_like(flat)
    steps = 0

    def step(gradients: Tensor, factor: float) -> None:
        nonlocal steps
        steps += 1
        first.lerp_(gradients, 0.1)
        second.mul_(0.999).addcmul_(gradients, gradients, value=0.001)
        flat[:, :decayed].mul_(1 - 0.01 * factor * lr[:, None])
        scale = (second / (1 - 0.999**steps)).sqrt_().add_(1e-8)
        flat.sub_(first / scale * (lr * factor / (1 - 0.9**steps))[:, None])

    return step


def _module(model: str, sizes: Sizes) -> nn.Module:
    if model == "vit":
        patch, side = _Images.patch, _Images.side
        return PatchTransformer(
            width=sizes.width,
            layers=sizes.layers,
            heads=sizes.heads,
            patches=(side // patch) ** 2,
            patch_size=patch**2,
            classes=CLASSES,
        )
    kind = {"gpt": Gpt, "llama": Llama}[model]
    return kind(width=sizes.width, layers=sizes.layers, heads=sizes.heads, context=sizes.context)


def _is_coded(parameter: Tensor) -> bool:
    """As `trimtab.compress` decides; less what is no whole number of blocks."""
    return parameter.dim() > 1 and parameter.numel() >= MIN_NUMEL and parameter.numel() % 1024 == 0


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + step)
