"""Make one training of several: ranks that trained apart for some steps continue as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
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
    layout = repr(([(tuple(tensor.shape), tensor.dtype) for tensor in tensors], list(_numbers(optimizers))))
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
    """What optimizers keep for each value of a parameter."""
    for state in _of_parameters(optimizers):
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                yield value


def _numbers(optimizers: Sequence[Optimizer]) -> Iterator[Any]:
    """Everything else that decides how weights change, such as counts of steps and learning rates.

    Of lists, as LBFGS keeps them, nothing is known: they count as unlike on all ranks.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from (_shown(value) for key, value in sorted(group.items()) if key != "params")
    for state in _of_parameters(optimizers):
        for value in state.values():
            if not (isinstance(value, torch.Tensor) and value.numel() > 1):
                yield _shown(value)


def _shown(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    plain = isinstance(value, (bool, int, float, str, type(None)))
    return value if plain or (isinstance(value, tuple) and all(map(_is_number, value))) else id(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _of_parameters(optimizers: Sequence[Optimizer]) -> Iterator[dict[str, Any]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                yield dict(sorted(optimizer.state.get(p, {}).items()))


def forget_lost(optimizers: Sequence[Optimizer]) -> None:
    """What optimizers kept of gradients that were not finite would spoil the next weights too."""
    for state in _of_parameters(optimizers):
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.nan_to_num_(0.0, 0.0, 0.0)
