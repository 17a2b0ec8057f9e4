"""Make one training of several: ranks that trained apart for some steps continue as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

from trimtab.control.rank_values import gather_numbers


@torch.no_grad()
def unify(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    team: dist.ProcessGroup,
    group: dist.ProcessGroup,
    *,
    samples: int,
    skipped: int,
) -> bool:
    """Average weights, buffers and optimizer states over the ranks of this rank's `team`, weighted by samples.

    Collective over `group`. Returns False on all ranks, and changes nothing, where that would not make one training
    of them: the states of their optimizers are not alike or not numbers to average, or their GradScalers skipped
    different numbers of steps (`skipped`) and so have different scales.
    """
    states = list(_states(optimizers))
    weights = [p.detach() for p in module.parameters() if p.requires_grad]
    buffers = [b for b in module.buffers() if b.is_floating_point()]
    tensors = [*weights, *buffers, *states]
    layout = repr([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    usable = all(state.is_floating_point() for state in states)
    rows = gather_numbers([float(crc32(layout.encode())), float(skipped), float(usable)], group)
    if any(row != rows[0] or not row[2] for row in rows):
        return False
    total = torch.tensor([float(samples)], device=weights[0].device)
    dist.all_reduce(total, group=team)
    flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors]).mul_(samples / float(total))
    dist.all_reduce(flat, group=team)
    for tensor, mean in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))
    return True


def _states(optimizers: Sequence[Optimizer]) -> Iterator[torch.Tensor]:
    """What optimizers keep for each value of a parameter. Single numbers, such as counts of steps, are alike."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                for _, value in sorted(optimizer.state.get(p, {}).items()):
                    if isinstance(value, torch.Tensor) and value.numel() > 1:
                        yield value
