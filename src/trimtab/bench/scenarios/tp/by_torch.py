"""The model of `trimtab bench tp`, split by torch's own `parallelize_module`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from trimtab.bench.trainer import Trainer
from trimtab.models.tasks import Task


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all rows that are compared with torch's."""
    split = [p for name, p in model.named_parameters() if name.startswith("blocks.") and "norm" not in name]
    rest = [p for p in model.parameters() if not any(p is other for other in split)]
    # Separate groups: torch's own distributed parameters and plain ones cannot be updated by one kernel.
    return torch.optim.AdamW([{"params": split}, {"params": rest}], lr=3e-4)


def by_torch(own: Task) -> Trainer:
    """The model split as torch's documentation advises."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(own.device.type, (dist.get_world_size(),))
    for layer in own.model.get_submodule("blocks").children():
        for name, parameter in layer.qkv.named_parameters():  # type: ignore[union-attr]
            # Columns are split as they come: each rank's queries, keys and values must be next to each other.
            ordered = parameter.data.unflatten(0, (3, mesh.size(), -1)).transpose(0, 1)
            setattr(layer.qkv, name, torch.nn.Parameter(ordered.flatten(0, 2).contiguous()))
        columns = {name: ColwiseParallel() for name in ("qkv", "up")}
        rows = {name: RowwiseParallel() for name in ("out", "down")}
        parallelize_module(layer, mesh, {**columns, **rows})
    return Trainer(own.model, adamw(own.model), lambda step: own.batch(step=step), own.device)
