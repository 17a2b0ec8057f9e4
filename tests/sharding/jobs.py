"""What the ranks of these tests share: converting a model, and comparing it with one on a single device."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tests.sharding.models import loss_of, make
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from trimtab.api.tensor_parallel import tensor_parallel
from trimtab.sharding import move
from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    import random
    from collections.abc import Callable


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def convert(model: nn.Module, **options: Any) -> nn.Module:
    return tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)), **options)


@dataclass
class Pair:
    """The same model on a single device and spread over the ranks, trained in step."""

    kind: str
    alone: nn.Module
    spread: nn.Module
    alone_optimizer: torch.optim.Optimizer
    spread_optimizer: torch.optim.Optimizer
    steps: int = 0
    losses: Any = None
    """The last step's, with their graphs: a training loop's own variable keeps its loss alive as well."""

    @classmethod
    def make(
        cls, kind: str, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw, **options: Any
    ) -> Pair:
        alone = make(kind)
        spread = convert(copy.deepcopy(alone), **options)
        return cls(kind, alone, spread, optimizer(alone), optimizer(spread))

    def step(self) -> float:
        """One step of both; gives the largest difference of loss, gradients, and parameters after it."""
        losses = [loss_of(self.kind, model, self.steps) for model in (self.alone, self.spread)]
        self.losses = losses
        for loss, optimizer in zip(losses, (self.alone_optimizer, self.spread_optimizer), strict=True):
            optimizer.zero_grad()
            loss.backward()
        worst = float((losses[0] - losses[1]).detach().abs())
        worst = max(worst, difference(self.alone, self.spread, lambda p: p.grad))
        self.alone_optimizer.step()
        self.spread_optimizer.step()
        self.steps += 1
        return max(worst, difference(self.alone, self.spread, lambda p: p.data))


def difference(alone: nn.Module, spread: nn.Module, of: Callable[[nn.Parameter], Tensor | None]) -> float:
    """The largest difference between what this rank holds and the same part of the single device's."""
    places = {tensor.name: (block, tensor) for block, tensor in sharded_model(spread, "test").tensors()}
    whole = dict(alone.named_parameters())
    assert whole.keys() == dict(spread.named_parameters()).keys()
    worst = 0.0
    for name, parameter in spread.named_parameters():
        expected, actual = of(whole[name]), of(parameter)
        assert expected is not None
        assert actual is not None
        if name in places:
            block, tensor = places[name]
            expected = tensor.axis.select(expected, torch.tensor(block.owned, dtype=torch.int64))
            padding = actual[expected.shape[0] :]
            assert not padding.any(), f"{name}: what is no unit is not zero"
            actual = actual[: expected.shape[0]]
        assert actual.shape == expected.shape, name
        if actual.numel():
            worst = max(worst, float((actual - expected).abs().max()))
    return worst


def trained_gap(
    alone: nn.Module, spread: nn.Module, loss: Callable[[nn.Module, int], Tensor], steps: int = 3
) -> float:
    """The largest difference of losses, gradients and parameters of some steps, with a move after the first."""
    models = (alone, spread)
    optimizers = [adamw(model) for model in models]
    worst = 0.0
    for step in range(steps):
        losses = [loss(model, step) for model in models]
        for each, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            each.backward()
        worst = max(worst, float((losses[0] - losses[1]).detach().abs()))
        worst = max(
            worst, difference(alone, spread, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
        )
        for optimizer in optimizers:
            optimizer.step()
        worst = max(worst, difference(alone, spread, lambda p: p.data))
        if step == 0:
            blocks = sharded_model(spread, "test").blocks
            move(
                spread,
                optimizers[1],
                {n: [list(own)[::-1] for own in b.table.slots[::-1]] for n, b in blocks.items()},
            )
    return worst


def random_assignment(model: nn.Module, source: random.Random) -> dict[str, list[list[int]]]:
    """Any assignment of some blocks, empty ranks included; the same on every rank."""
    sharded = sharded_model(model, "test")
    chosen = {}
    for name, block in sharded.blocks.items():
        if source.random() < 0.7:
            lists: list[list[int]] = [[] for _ in range(sharded.group.size)]
            weights = [source.random() for _ in lists]
            for unit in range(block.units):
                source.choices(lists, weights)[0].append(unit)
            chosen[name] = lists
    return chosen
