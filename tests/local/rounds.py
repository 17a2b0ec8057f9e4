"""A small model, its steps, and rounds of local steps computed in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trimtab.local.fragments import Part, split, turns

WIDTH = 24


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
    )


def wide_net() -> nn.Sequential:
    """Its first weight is large enough to be cut."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2800), nn.Tanh(), nn.Linear(2800, 3))


def batch(step: int, rank: int, samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(samples, WIDTH, generator=generator), torch.randn(samples, 3, generator=generator)


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, samples: int = 4
) -> None:
    train_on(model, optimizer, batch(step, rank, samples))


def train_on(
    model: nn.Module, optimizer: torch.optim.Optimizer, pair: tuple[torch.Tensor, torch.Tensor]
) -> None:
    inputs, targets = pair
    F.mse_loss(model(inputs), targets).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def in_one_process(
    steps: int,
    samples: Sequence[int],
    settings: dict[str, Any],
    batches: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]] | None = None,
    make: Callable[[], nn.Module] = net,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Every worker's weights, and the agreed ones, after so many steps and one more look before the next.

    Args:
        samples: of each worker's batch; what it counts for are those since a fragment was last sent.
        batches: each worker's batch of a step.
    """
    of_step = batches or (lambda step, worker: batch(step, worker, samples[worker]))
    workers = [make() for _ in samples]
    optimizers = [optimizer_for(worker) for worker in workers]
    named = dict(make().named_parameters())
    fragments = split({name: tuple(p.shape) for name, p in named.items()}, settings["fragments"])
    places = turns(settings["every"], len(fragments))
    parts = [part for fragment in fragments for part in fragment]
    agreed = {part: part.of(named[part.name].detach()).clone() for part in parts}
    momentum = {name: torch.zeros_like(p) for name, p in agreed.items()}
    flight: dict[int, tuple[int, dict[Part, torch.Tensor], list[dict[Part, torch.Tensor]]]] = {}
    own = [
        {part: part.of(dict(worker.named_parameters())[part.name].detach()) for part in parts}
        for worker in workers
    ]

    def take(index: int) -> None:
        _, change, sent = flight.pop(index)
        for name in fragments[index]:
            momentum[name] = settings["outer_momentum"] * momentum[name] + change[name]
            agreed[name] = agreed[name] - settings["outer_lr"] * (
                change[name] + settings["outer_momentum"] * momentum[name]
            )
            for parameters, before in zip(own, sent, strict=True):
                kept = settings.get("keep", 1.0) * (parameters[name].data - before[name])
                parameters[name].data.copy_(agreed[name] + kept)

    seen = [[0] * len(workers) for _ in fragments]
    for step in range(1, steps + 1):
        for rank, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            inputs, targets = of_step(step, rank)
            train_on(worker, optimizer, (inputs, targets))
            for counts in seen:
                counts[rank] += len(inputs)
        for index, names in enumerate(fragments):
            if index in flight and step - flight[index][0] >= settings["delay"]:
                take(index)
            if step % settings["every"] == places[index] % settings["every"]:
                sent = [{name: parameters[name].detach().clone() for name in names} for parameters in own]
                weights = [count / sum(seen[index]) for count in seen[index]]
                seen[index] = [0] * len(workers)
                change = {
                    name: agreed[name] - sum(w * s[name] for w, s in zip(weights, sent, strict=True))
                    for name in names
                }
                flight[index] = step, change, sent
                if not settings["delay"]:
                    take(index)
    return [flat(worker) for worker in workers], torch.cat([value.reshape(-1) for value in agreed.values()])
