"""Names that differ between the versions of torch that trimtab supports (2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

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


def takes_bucket_list() -> bool:
    """Whether DDP's buckets may have a size each (2.13)."""
    return "bucket_cap_mb_list" in signature(DistributedDataParallel.__init__).parameters


def rebuild_reducer(ddp: Any, caps_mb: Sequence[float]) -> None:
    """Give a DDP module of torch 2.13 a new reducer, with buckets of these sizes and no communication hook.

    As DDP's constructor does it. Not while a backward pass runs; gradients that exist are kept.
    """
    config = type(ddp._bucket_config).create(
        bucket_cap_mb=None, bucket_cap_mb_list=list(caps_mb), use_python_reducer=False
    )
    ddp._bucket_config, ddp.bucket_bytes_cap = config, config.bucket_bytes_cap
    ddp.bucket_bytes_cap_list, ddp.bucket_bytes_cap_default = list(config.per_bucket_bytes_caps), False
    # Removes its hooks from the parameters, and frees its buckets before there are new ones.
    del ddp.reducer, ddp.logger
    parameters, expect_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
