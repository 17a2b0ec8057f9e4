"""What about a model forbids uneven batches."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn


def problem_of_model(model: nn.Module) -> str | None:
    """Why batches of a DDP or FSDP2 module must be equal on all ranks; None if they need not."""
    for name, module in model.named_modules():
        normalizes = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
        if normalizes and not isinstance(module, nn.SyncBatchNorm):
            return f"{type(module).__name__} {name} normalizes by each rank's own samples"
    if getattr(getattr(model, "_join_config", None), "enable", False):
        return "ranks may run out of data one by one (DDP's join)"
    group = getattr(model, "process_group", None)
    if group is not None and group.size() != dist.get_world_size():
        return "DistributedDataParallel averages over some of the ranks only"
    return None
