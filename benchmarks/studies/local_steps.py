"""Local steps without a network: all workers of all configurations trained side by side, for choosing the outer step.

Every worker is a copy of a small GPT with an AdamW of its own; the copies are stacked, and one batched pass trains
them all. Fragments are averaged in turns, and taken after a delay, as `trimtab.local_steps` does by default; nothing is
encoded. Prints a table: the loss at the agreed weights on text that is not trained on, its gap to one worker with the
whole batch (`ddp`), and how far the workers' changes agreed.

    python -m benchmarks.studies.local_steps --device cuda --json FILE
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from trimtab.models.data import text
from trimtab.models.gpt import Gpt
from trimtab.planning.local_steps import default_delay

HELD_OUT = 0.05
WARM_UP = 100
DECAY = 0.9
"""Of the sums from which agreement is estimated, per exchange of a fragment."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run. A batch is a worker's."""

    workers: int
    batch: int
    every: int = 1
    fragments: int = 7
    delay: int | None = None
    eta: float | str = 1.0
    """Outer learning rate, or "auto": such that the gain is that of the agreement."""
    momentum: float = 0.0
    inner: float | str = 1.0
    """Factor of the inner learning rate; "auto": that of the agreement, divided by the outer step's gain."""
    lr: float = 1e-3
    seed: int = 0

    @property
    def name(self) -> str:
        return "ddp" if self.every == 1 else "local"


class Stack:
    """Copies of one GPT, as rows of one matrix; a pass gives every copy's own loss."""

    def __init__(self, model: Gpt, copies: int, heads: int, device: torch.device) -> None:
        named = dict(model.named_parameters())
        self.names, self.heads = list(named), heads
        # Linear weights are kept as (in, out): so they are multiplied without a copy.
        self._linear = {
            name: p.dim() == 2 and "tokens" not in name and "places" not in name for name, p in named.items()
        }
        values = [p.detach().t() if self._linear[name] else p.detach() for name, p in named.items()]
        self.shapes = [tuple(value.shape) for value in values]
        self.sizes = [value.numel() for value in values]
        row = torch.cat([value.reshape(-1) for value in values]).to(device)
        self.flat = row.repeat(copies, 1).requires_grad_()
        self.layers = len(model.blocks)

    def losses(self, tokens: torch.Tensor, flat: torch.Tensor | None = None) -> torch.Tensor:
        flat = self.flat if flat is None else flat
        half = torch.bfloat16 if flat.is_cuda else torch.float32
        parts = flat.to(half).split(self.sizes, dim=1)
        copies, batch, length = tokens.shape[0], tokens.shape[1], tokens.shape[2] - 1
        w = {
            name: part.view(copies, *shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            x = x.to(half).flatten(1, 2)
            bias = w.get(f"{name}.bias")
            weight = w[f"{name}.weight"]
            y: torch.Tensor = (
                torch.bmm(x, weight) if bias is None else torch.baddbmm(bias[:, None], x, weight)
            )
            return torch.unflatten(y, 1, (batch, length))

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            y = F.layer_norm(x, x.shape[-1:])
            scaled: torch.Tensor = y * w[f"{name}.weight"][:, None, None] + w[f"{name}.bias"][:, None, None]
            return scaled

        table = w["tokens.weight"]
        rows = tokens[..., :-1] + (torch.arange(copies, device=tokens.device) * table.shape[1])[:, None, None]
        x = (
            F.embedding(rows, table.reshape(-1, table.shape[2])).float()
            + w["places.weight"][:, None, :length]
        )
        for layer in range(self.layers):
            own = f"blocks.{layer}"
            q, k, v = (
                linear(norm(x, f"{own}.norm1"), f"{own}.qkv").flatten(0, 1).unflatten(2, (3, self.heads, -1))
                .permute(2, 0, 3, 1, 4).unbind()
            )  # fmt: skip
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + linear(mixed.unflatten(0, (copies, batch)), f"{own}.out")
            y = linear(norm(x, f"{own}.norm2"), f"{own}.up")
            x = x + linear(F.gelu(y, approximate="tanh"), f"{own}.down")
        logits = linear(norm(x, "norm"), "head").flatten(0, 2).float()
        each = F.cross_entropy(logits, tokens[..., 1:].flatten(), reduction="none")
        return each.view(copies, -1).mean(1)


class Run:
    """The local steps of one configuration, whose workers are some rows of the stack."""

    def __init__(self, config: Config, rows: slice, flat: torch.Tensor, sizes: Sequence[int]) -> None:
        self.config, self.rows, self.flat = config, rows, flat
        self.agreed = flat[rows.start].clone()
        self.momentum = torch.zeros_like(self.agreed)
        count = max(1, min(config.fragments, config.every // 2))
        total, ends = sum(sizes), []
        for index in range(count):  # between tensors, about evenly
            done, end = 0, 0
            for size in sizes:
                if done + size / 2 <= total * (index + 1) / count:
                    end = done + size
                done += size
            ends.append(end)
        self.pieces = [slice(a, b) for a, b in zip([0, *ends[:-1]], [*ends[:-1], total], strict=True)]
        self.turns = [max(1, (index + 1) * config.every // count) for index in range(count)]
        self.delay = default_delay(config.every, count) if config.delay is None else config.delay
        self.flight: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}
        self.inner = 1.0 if config.inner == "auto" else float(config.inner)
        self.wanted = 1.0
        self.norms = [0.0, 0.0]
        self.pending: list[tuple[int, torch.Tensor]] = []
        self.agreements: list[float] = []
        self.gains: list[float] = []

    def after(self, step: int) -> None:
        """`step` counts from 1."""
        if self.config.every == 1:
            return
        place = (step - 1) % self.config.every + 1
        for index, piece in enumerate(self.pieces):
            flight = self.flight.get(index)
            if flight is not None and (step - flight[0] >= self.delay or place == self.turns[index]):
                self.take(index)
            if place == self.turns[index]:
                sent = self.flat[self.rows, piece].clone()
                own = self.agreed[piece] - sent
                mean = own.mean(0)
                norms = torch.stack([mean.square().sum(), own.square().sum() / len(own)])
                self.flight[index] = step, mean, sent
                self.pending.append((index, norms))
                if not self.delay:
                    self.take(index)

    def take(self, index: int) -> None:
        _, mean, sent = self.flight.pop(index)
        norms = next(norms for at, norms in self.pending if at == index)
        self.pending = [(at, norms) for at, norms in self.pending if at != index]
        self.norms = [DECAY * old + new for old, new in zip(self.norms, norms.tolist(), strict=True)]
        self.follow()
        config, piece = self.config, self.pieces[index]
        momentum = self.momentum[piece].mul_(config.momentum).add_(mean)
        eta = (1 - config.momentum) * self.wanted if config.eta == "auto" else float(config.eta)
        agreed = self.agreed[piece].sub_(mean + config.momentum * momentum, alpha=eta)
        self.flat[self.rows, piece] += agreed - sent

    def follow(self) -> None:
        """What agreement says about the gain."""
        whole, each = self.norms
        m = self.config.workers
        rho = min(1.0, max(0.0, (whole / each - 1 / m) / (1 - 1 / m))) if each > 0 else 1.0
        one = rho / (rho + self.config.every * (1 - rho)) if rho else 0.0
        self.wanted = 1 / math.sqrt(one + (1 - one) / m)
        self.agreements.append(rho)
        self.gains.append(self.wanted)
        if self.config.inner == "auto":
            outer = 1.0 if self.config.eta == "auto" else float(self.config.eta) / (1 - self.config.momentum)
            self.inner = max(1.0, self.wanted / outer)

    def row(self) -> dict[str, Any]:
        def mean(values: list[float]) -> float | None:
            later = values[len(values) // 4 :]
            return sum(later) / len(later) if later else None

        return {
            **asdict(self.config),
            "name": self.config.name,
            "rho": mean(self.agreements),
            "gain": mean(self.gains),
        }


def starts(corpus: int, length: int, count: int, seed: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.randint(corpus - length - 1, (count,), generator=generator)


def train(configs: Sequence[Config], args: argparse.Namespace, steps: int) -> list[dict[str, Any]]:
    """Train configurations with the same batch of a worker together."""
    device = torch.device(args.device)
    began = time.monotonic()
    whole = text().to(device)
    border = int(len(whole) * (1 - HELD_OUT))
    corpus, held = whole[:border], whole[border:]
    torch.manual_seed(0)
    heads = max(1, args.width // 64)
    model = Gpt(width=args.width, layers=args.layers, heads=heads, context=args.context)
    stack = Stack(model, sum(c.workers for c in configs), heads, device)
    flat = stack.flat.data
    runs, first = [], 0
    for config in configs:
        runs.append(Run(config, slice(first, first + config.workers), flat, stack.sizes))
        first += config.workers
    average, square = torch.zeros_like(flat), torch.zeros_like(flat)
    beta1, beta2, decay = 0.9, 0.95, 0.1
    arange = torch.arange(args.context + 1, device=device)
    batch = configs[0].batch
    for step in range(1, steps + 1):
        # Samples are those of the whole batch: `ddp` and all divisions of it see the same text.
        by_seed = {
            (c.seed, c.workers): starts(len(corpus), args.context, batch * c.workers, c.seed, step)
            for c in configs
        }
        places = torch.cat([by_seed[c.seed, c.workers] for c in configs]).to(device)
        tokens = corpus[places[:, None] + arange].long().view(len(flat), batch, -1)
        (gradient,) = torch.autograd.grad(stack.losses(tokens).sum(), stack.flat)
        norm = gradient.norm(dim=1, keepdim=True)
        gradient *= (1.0 / norm).clamp(max=1.0)
        rate = min(1.0, step / WARM_UP) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        rates = [rate * run.config.lr for run in runs for _ in range(run.config.workers)]
        scales = [run.inner for run in runs for _ in range(run.config.workers)]
        lr = torch.tensor(rates, device=device)[:, None]
        scaled = lr * torch.tensor(scales, device=device)[:, None]
        average.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        flat.mul_(1 - lr * decay)
        root = torch.sqrt(square / (1 - beta2**step)).add_(1e-8)
        flat.addcmul_(average / root, -scaled / (1 - beta1**step))
        del gradient, root
        for run in runs:
            run.after(step)
    rows = []
    for run in runs:
        final = flat[run.rows].mean(0, keepdim=True)
        losses = []
        with torch.no_grad():
            for step in range(args.evaluate):
                places = starts(len(held), args.context, 64, 999, step).to(device)
                losses.append(float(stack.losses(held[places[:, None] + arange].long()[None], final)[0]))
        rows.append({**run.row(), "steps": steps, "loss": sum(losses) / len(losses)})
    seconds = time.monotonic() - began
    for row in rows:
        row["group_seconds"] = round(seconds, 1)
    return rows


def grid(name: str) -> list[Config]:
    """The configurations of a part of the study."""
    product: dict[str, Any] = {"eta": 0.7, "momentum": 0.5}
    if name == "small":  # the case that failed: four workers of 8
        base = Config(workers=4, batch=8, every=15)
        return [
            replace(base, **product),
            replace(base, **product, inner="auto"),
            replace(base, inner="auto"),
            replace(base, inner=2.0),
            replace(base, inner=2.8),
            replace(base, inner=2.0, **product),
            replace(base, eta=2.0),
            replace(base, eta="auto", momentum=0.5),
            replace(base, eta=1.0, momentum=0.5, inner=1.4),
            replace(base, every=30, inner="auto"),
            replace(base, every=30, inner="auto", **product),
            replace(base, every=30, **product),
            replace(base, every=6, inner="auto"),
            replace(base, every=6, inner="auto", **product),
            replace(base, every=2, inner="auto", **product),
            replace(base, every=15, fragments=1, delay=0, inner="auto"),
            replace(base, every=15, fragments=1, delay=0, inner="auto", **product),
            replace(base, workers=1, every=1),
        ]
    if name == "two":  # two workers of 16
        base = Config(workers=2, batch=16, every=15)
        return [
            replace(base, **product),
            replace(base, inner="auto", **product),
            replace(base, inner="auto"),
            replace(base, every=30, inner="auto"),
            replace(base, every=30, **product),
            replace(base, every=30, inner=1.4, **product),
        ]
    if name == "large":  # workers of 32
        base = Config(workers=4, batch=32, every=15)
        return [
            replace(base, **product),
            replace(base, inner="auto", **product),
            replace(base, inner="auto"),
            replace(base, workers=2, every=30, **product),
            replace(base, workers=2, every=30, inner="auto"),
            Config(workers=1, batch=32),
            Config(workers=1, batch=32, lr=2e-3),
            Config(workers=1, batch=32, lr=5e-4),
            Config(workers=1, batch=32, seed=1),
        ]
    if name == "largest":
        return [
            Config(workers=1, batch=128),
            Config(workers=1, batch=128, seed=1),
        ]
    if name == "tiny":
        base = Config(workers=4, batch=2, every=15)
        return [
            replace(base, **product),
            replace(base, inner="auto", **product),
            replace(base, inner="auto"),
        ]
    assert name == "64"
    return [Config(workers=1, batch=64)]


def table(rows: Sequence[dict[str, Any]]) -> None:
    """Gaps are relative to `ddp` with the same samples in a step, of the same length and seed 0."""
    whole = {
        (row["batch"], row["steps"]): row["loss"]
        for row in rows
        if row["name"] == "ddp" and row["lr"] == 1e-3 and row["seed"] == 0
    }
    print("workers batch every frag eta  mu   inner lr      rho   gain   loss    gap")
    for row in rows:
        baseline = whole.get((row["workers"] * row["batch"], row["steps"]))
        row["gap"] = None if baseline is None else row["loss"] / baseline - 1
        gap = "" if baseline is None else f"{row['gap']:+.1%}"
        rho, gain = (0.0 if row[key] is None else row[key] for key in ("rho", "gain"))
        print(
            f"{row['workers']:7} {row['batch']:5} {row['every']:5} {row['fragments']:4} {row['eta']!s:4} "
            f"{row['momentum']:3} {row['inner']!s:5} {row['lr']:.5f} {rho:.3f} {gain:.3f} {row['loss']:.4f} {gap}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--evaluate", type=int, default=20, help="batches of 64 held-out sequences")
    parser.add_argument("--parts", default="small:800,large:800,two:800,tiny:800,largest:800,64:800")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    for part in args.parts.split(","):
        name, steps = part.split(":")
        rows += train(grid(name), args, int(steps))
        print(f"# {part}: {time.monotonic() - began:.0f} s", flush=True)
        table(rows)
        if args.json is not None:
            args.json.write_text(
                json.dumps(
                    {
                        "study": "local_steps",
                        **{k: v for k, v in vars(args).items() if k != "json"},
                        "rows": rows,
                    },
                    indent=1,
                )
                + "\n"
            )


if __name__ == "__main__":
    main()
