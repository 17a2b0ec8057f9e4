"""The exactness part of `trimtab bench tp`: tiny models of many families on uneven ranks and on a single device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from trimtab.api.tensor_parallel import tensor_parallel
from trimtab.bench.harness import Progress
from trimtab.errors import TrimtabError
from trimtab.models.families import FAMILIES, Family
from trimtab.sharding import move
from trimtab.sharding.unit_block import sharded_model

EXACT = 1e-10
"""Largest difference that counts as the order of summation, in double precision."""

_STEPS = 3
_MOVE_AFTER = 1


def family_gap(family: Family, **options: Any) -> float:
    """The largest difference in loss, gradients and parameters over three steps, with a move in the middle.

    Every rank calls it. Shares are uneven, the second rank's the largest; the move reverses them.

    Args:
        options: those of `trimtab.tensor_parallel`.
    """
    alone = family.make()
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    shares = [float(rank + 1) for rank in range(size)]
    spread = tensor_parallel(copy.deepcopy(alone), mesh, shares=shares, **options)
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-6) for m in (alone, spread)
    ]
    worst = 0.0
    for step in range(_STEPS):
        losses = [family.loss(model, step) for model in (alone, spread)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        worst = max(worst, float((losses[0] - losses[1]).detach().abs()))
        worst = max(worst, difference(alone, spread, lambda p: p.grad))
        for optimizer in optimizers:
            optimizer.step()
        worst = max(worst, difference(alone, spread, lambda p: p.data))
        if step == _MOVE_AFTER:
            move(spread, optimizers[1], _reversed(spread))
    return worst


def family_gaps(_spec: Mapping[str, Any], report: Progress) -> dict[str, float]:
    """`family_gap` of every family, the largest of all ranks; inf for one that is refused. Every rank calls it."""
    gaps = {}
    for index, family in enumerate(FAMILIES):
        try:
            gaps[family.name] = family_gap(family)
        except TrimtabError:
            gaps[family.name] = float("inf")
        report(index + 1, len(FAMILIES))
    worst = torch.tensor(list(gaps.values()), dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return dict(zip(gaps, worst.tolist(), strict=True))


def _reversed(model: nn.Module) -> dict[str, list[list[int]]]:
    """Every rank gets what the rank opposite had, in reverse order."""
    blocks = sharded_model(model, "bench").blocks
    return {
        name: [[int(unit) for unit in owned][::-1] for owned in block.table.slots[::-1]]
        for name, block in blocks.items()
    }


def difference(alone: nn.Module, spread: nn.Module, of: Callable[[nn.Parameter], Tensor | None]) -> float:
    """The largest difference between what this rank holds and the same part of the single device's."""
    places = {tensor.name: (block, tensor) for block, tensor in sharded_model(spread, "bench").tensors()}
    whole = dict(alone.named_parameters())
    if whole.keys() != dict(spread.named_parameters()).keys():
        return float("inf")
    worst = 0.0
    for name, parameter in spread.named_parameters():
        expected, actual = of(whole[name]), of(parameter)
        if expected is None or actual is None:
            if expected is not actual:
                return float("inf")
            continue
        if name in places:
            block, tensor = places[name]
            expected = tensor.axis.select(expected, torch.tensor(block.owned, dtype=torch.int64))
            actual = actual[: expected.shape[0]]
        if actual.shape != expected.shape:
            return float("inf")
        if actual.numel():
            worst = max(worst, float((actual - expected).abs().max()))
    return worst
