"""Names that differ between the versions of torch that trimtab supports (2.11 to 2.13)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# 2.13 renamed them and warns on the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_single(
    output: torch.Tensor, values: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Every rank's `values`, one after another in rank order, in `output` on every rank."""
    work: dist.Work | None = _all_gather(output, values, group=group, async_op=async_op)
    return work


def reduce_scatter_single(
    output: torch.Tensor, values: torch.Tensor, group: dist.ProcessGroup, op: Any, *, async_op: bool = False
) -> dist.Work | None:
    """This rank's chunk of the reduced `values`, in `output`."""
    work: dist.Work | None = _reduce_scatter(output, values, op=op, group=group, async_op=async_op)
    return work
