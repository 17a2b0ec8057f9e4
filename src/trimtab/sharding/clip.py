"""The norm of the gradient of a model whose units are spread over ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trimtab.sharding.unit_block import sharded_model

if TYPE_CHECKING:
    from torch import Tensor, nn


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_` of the same model on a single device; gives the same norm on every rank.

    Each unit counts once, on the rank that owns it, and so does what every rank holds. Every rank calls it.
    """
    sharded = sharded_model(model, "clip_grad_norm_")
    spread = {id(tensor.parameter) for _, tensor in sharded.tensors()}
    parameters = [p for p in model.parameters() if p.grad is not None]
    owned = _total([p.grad for p in parameters if id(p) in spread and p.grad is not None], norm_type)
    shared = _total([p.grad for p in parameters if id(p) not in spread and p.grad is not None], norm_type)
    device = parameters[0].device if parameters else torch.device("cpu")
    owned, shared = owned.to(device), shared.to(device)
    largest = math.isinf(norm_type)
    if sharded.group.size > 1:
        dist.all_reduce(
            owned,
            dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM,
            group=sharded.group.process_group,
        )
    norm = torch.maximum(owned, shared) if largest else (owned + shared) ** (1 / norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the gradient's norm of order {norm_type} is {norm.item()}, so it cannot be clipped"
        )
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _total(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Sum of the powers of the norm's order, or the largest; in double, so that the order hardly matters."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm(gradients, norm_type)).double()
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
