"""Many small ViTs that train at once, and made-up images for them.

All parameters of a run are slices of stacked tensors, so that a GPU trains dozens of runs in the time of a few. The
parameters of each block are stored unit by unit, as `trimtab.sharding` stores them: a unit is a hidden unit of an MLP
or a head of attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class Size:
    """A ViT, its images and its training."""

    width: int
    layers: int
    heads: int
    head_dim: int
    hidden: int
    image: int
    train: int
    epochs: int
    patch: int = 4
    test: int = 2000
    batch: int = 64

    @property
    def steps_per_epoch(self) -> int:
        return self.train // self.batch


@dataclass(eq=False)
class Block:
    """The units of one attention or one MLP, for all runs."""

    name: str
    units: int
    width: int
    """Rows of each matrix that belong to a unit."""

    ins: list[Tensor]
    """Projections in: (runs, units x width, model width)."""

    biases: list[Tensor]
    out: Tensor
    """The projection out, transposed: (runs, units x width, model width)."""

    hidden_mask: Tensor | None = None
    """(runs, units x width): entries of the hidden activations that enter the product out."""

    in_mask: Tensor | None = None
    """(runs, units x width, model width): weights that the products in use; None for all."""

    watched: bool = False
    """Whether the next pass records `norms`: those of each hidden entry over all tokens, (runs, units x width)."""

    norms: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.ins, *self.biases, self.out]

    def project(self, x: Tensor) -> list[Tensor]:
        masked = self.ins if self.in_mask is None else [w * self.in_mask for w in self.ins]
        return [_product(x, w.mT, b) for w, b in zip(masked, self.biases, strict=True)]

    def merge(self, hidden: Tensor) -> Tensor:
        if self.watched:
            self.norms = hidden.detach().square().sum((1, 2)).sqrt()
        out = self.out if self.hidden_mask is None else self.out * self.hidden_mask[..., None]
        return _product(hidden, out, None)


@dataclass(eq=False)
class StackedVits:
    """Pre-norm ViTs whose outputs are averaged over patches. Runs with the same seed start from the same weights."""

    size: Size
    seeds: Sequence[int]
    device: torch.device
    blocks: list[Block] = field(default_factory=list)
    others: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.size
        inner = size.heads * size.head_dim
        patches = (size.image // size.patch) ** 2
        generators = {seed: torch.Generator().manual_seed(seed) for seed in self.seeds}
        drawn: dict[int, Tensor] = {}

        def stacked(draw: Callable[[torch.Generator], Tensor]) -> Tensor:
            drawn.clear()
            drawn.update({seed: draw(generator) for seed, generator in generators.items()})
            return (
                torch.stack([drawn[seed] for seed in self.seeds])
                .to(self.device)
                .contiguous()
                .requires_grad_()
            )

        def matrix(rows: int, columns: int, fan_in: int) -> Tensor:
            return stacked(lambda g: torch.randn(rows, columns, generator=g) / math.sqrt(fan_in))

        def constant(value: float, *shape: int) -> Tensor:
            return stacked(lambda g: torch.full(shape, value))

        self.others["patch"] = matrix(size.patch**2, size.width, size.patch**2)
        self.others["position"] = stacked(lambda g: torch.randn(patches, size.width, generator=g) * 0.02)
        for layer in range(size.layers):
            for kind in ("attention", "mlp"):
                self.others[f"{layer}.{kind}.norm"] = constant(1.0, size.width)
                self.others[f"{layer}.{kind}.bias"] = constant(0.0, size.width)
                rows = inner if kind == "attention" else size.hidden
                projections = 3 if kind == "attention" else 1
                self.blocks.append(
                    Block(
                        name=f"{layer}.{kind}",
                        units=size.heads if kind == "attention" else size.hidden,
                        width=size.head_dim if kind == "attention" else 1,
                        ins=[matrix(rows, size.width, size.width) for _ in range(projections)],
                        biases=[constant(0.0, rows) for _ in range(projections)],
                        out=matrix(rows, size.width, rows * 2 * size.layers),
                    )
                )
        self.others["norm"] = constant(1.0, size.width)
        self.others["bias"] = constant(0.0, size.width)
        self.others["head"] = matrix(size.width, CLASSES, size.width)

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.others.values(), *(tensor for block in self.blocks for tensor in block.tensors)]

    def logits(self, images: Tensor) -> Tensor:
        """Of images (runs, batch, pixels in patches): (runs, batch, classes)."""
        others, size = self.others, self.size
        runs, batch = images.shape[:2]
        x = _product(images, others["patch"], None) + others["position"][:, None]
        for block in self.blocks:
            normed = self._norm(x, f"{block.name}.norm", f"{block.name}.bias")
            if block.name.endswith("mlp"):
                (hidden,) = block.project(normed)
                hidden = F.gelu(hidden)
            else:
                q, k, v = (
                    p.view(runs * batch, -1, size.heads, size.head_dim).transpose(1, 2)
                    for p in block.project(normed)
                )
                with sdpa_kernel(SDPBackend.MATH):  # heads and sequences are too small for fused kernels
                    mixed = F.scaled_dot_product_attention(q, k, v)
                hidden = mixed.transpose(1, 2).reshape(runs, batch, -1, size.heads * size.head_dim)
            x = x + block.merge(hidden)
        return torch.bmm(self._norm(x, "norm", "bias").mean(2), others["head"])

    def _norm(self, x: Tensor, scale: str, bias: str) -> Tensor:
        normed = F.layer_norm(x, x.shape[-1:])
        return normed * self.others[scale][:, None, None] + self.others[bias][:, None, None]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (runs, batch, tokens, in) times weight (runs, in, out)."""
    flat = x.flatten(1, 2)
    y = torch.bmm(flat, weight) if bias is None else torch.baddbmm(bias[:, None], flat, weight)
    return y.view(*x.shape[:3], -1)


class AdamW:
    """AdamW on stacked parameters; what is frozen keeps its weights and states to the bit."""

    def __init__(self, parameters: Sequence[Tensor], *, decay: float) -> None:
        self.parameters, self.decay = parameters, decay
        self.states = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
        self.steps = 0

    @torch.no_grad()
    def step(self, lr: float, frozen: dict[int, Tensor]) -> None:
        """Update by the parameters' gradients, except where the mask of `frozen`, by id, is true."""
        self.steps += 1
        first, second = 1 - 0.9**self.steps, 1 - 0.999**self.steps
        for p, (m, v) in zip(self.parameters, self.states, strict=True):
            assert p.grad is not None
            mask = frozen.get(id(p))
            before = [] if mask is None else [(x, x.clone()) for x in (p, m, v)]
            m.lerp_(p.grad, 0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            if p.ndim > 2:
                p.mul_(1 - lr * self.decay)
            p.addcdiv_(m / first, (v / second).sqrt_().add_(1e-8), value=-lr)
            for value, old in before:
                assert mask is not None
                torch.where(mask, old, value, out=value)
            p.grad = None


def images(count: int, size: Size, seed: int) -> tuple[Tensor, Tensor]:
    """Strokes of ten shapes, turned, scaled and shifted, with strokes of other shapes and noise: patches and labels."""
    shapes = torch.rand(CLASSES, 5, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=g)
    drawn = _strokes(shapes[labels], size.image, g)
    others = torch.randint(CLASSES, (count,), generator=g)
    start = torch.randint(0, 4, (count, 1), generator=g)
    piece = torch.stack(
        [shapes[others].gather(1, (start + i)[..., None].expand(-1, -1, 2))[:, 0] for i in (0, 1)], 1
    )
    drawn = torch.maximum(drawn, _strokes(piece, size.image, g))
    drawn = drawn + 0.3 * torch.randn(drawn.shape, generator=g)
    n, p = size.image // size.patch, size.patch
    cut = drawn.view(count, n, p, n, p).transpose(2, 3).reshape(count, n * n, p * p)
    return cut, labels


def _strokes(points: Tensor, image: int, g: torch.Generator) -> Tensor:
    """Polylines through points (count, points, 2) in [-1, 1], each moved at random, on images."""
    count = len(points)
    turn, scale = (torch.rand(count, generator=g) - 0.5) * 0.6, 0.5 + 0.3 * torch.rand(count, generator=g)
    shift = (torch.rand(count, 1, 2, generator=g) - 0.5) * 0.3
    c, s = turn.cos() * scale, turn.sin() * scale
    moved = points @ torch.stack([torch.stack([c, s], -1), torch.stack([-s, c], -1)], 1) + shift
    axis = torch.linspace(-1, 1, image)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).view(1, -1, 2)
    nearest = torch.full((count, image * image), math.inf)
    for a, b in zip(moved.unbind(1)[:-1], moved.unbind(1)[1:], strict=True):
        along = (b - a)[:, None]
        t = ((grid - a[:, None]) * along).sum(-1) / along.square().sum(-1).clamp_min(1e-6)
        nearest = torch.minimum(nearest, (grid - a[:, None] - t.clamp(0, 1)[..., None] * along).norm(dim=-1))
    return (1.5 - nearest * image / 2).clamp(0, 1).view(count, image, image)
