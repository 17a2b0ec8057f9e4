"""Names that differ between the versions of torch that trimtab supports (2.11 to 2.13)."""

from __future__ import annotations

from dataclasses import replace
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
    output: torch.Tensor, values: torch.Tensor, group: dist.ProcessGroup, op: Any
) -> None:
    """This rank's chunk of the reduced `values`, in `output`."""
    _reduce_scatter(output, values, op=op, group=group)


def rebuild_reducer(ddp: Any, cap: int) -> None:
    """Give a DDP module a new reducer, with buckets of `cap` bytes and no communication hook.

    As DDP's constructor and `__setstate__` do it. Not while a backward pass runs. Gradients that exist are kept.
    """
    if hasattr(ddp, "_bucket_config"):  # torch 2.13
        ddp._bucket_config = replace(ddp._bucket_config, bucket_bytes_cap=cap)
    ddp.bucket_bytes_cap = cap
    del (
        ddp.reducer,
        ddp.logger,
    )  # removes its hooks from the parameters, and frees its buckets before there are new ones
    parameters, expect_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
