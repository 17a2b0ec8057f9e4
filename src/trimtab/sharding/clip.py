"""Gradient clipping for a model whose units are sharded over ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.sharding.unit_block import sharded_model


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` with the result of a single device; returns the same norm on every rank.

    Every rank calls it. Each unit counts once, on the rank that owns it; replicated parameters count once.
    """
    sharded = sharded_model(model, "clip_grad_norm_")
    by_unit = {id(tensor.parameter) for _, tensor in sharded.tensors()}
    parameters = [p for p in model.parameters() if p.grad is not None]
    units = _total([p.grad for p in parameters if id(p) in by_unit and p.grad is not None], norm_type)
    replicated = _total(
        [p.grad for p in parameters if id(p) not in by_unit and p.grad is not None], norm_type
    )
    device = parameters[0].device if parameters else torch.device("cpu")
    units, replicated = units.to(device), replicated.to(device)
    largest = math.isinf(norm_type)
    if sharded.group.size > 1:
        dist.all_reduce(
            units,
            dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM,
            group=sharded.group.process_group,
        )
    norm = torch.maximum(units, replicated) if largest else (units + replicated) ** (1 / norm_type)
    if sharded.replicas is not None:
        sharded.replicas.agree(norm)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the gradient norm of order {norm_type} is {norm.item()}, so it cannot be clipped"
        )
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _total(gradients: list[Tensor], norm_type: float) -> Tensor:
    """The sum of powers, or the maximum for an infinite order; in double, for accuracy."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm(gradients, norm_type)).double()
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
