"""The ranks that share one model, and the two ends of a block where they meet.

Each block of units costs one all-reduce forward and one backward, whatever the assignment:

1. `enter`: every rank has the same input. Forward nothing happens; backward the ranks' gradients of
   it, each from its own units, are added up.
2. `leave`: every rank has the sum over its own units. Forward the sums are added up; backward
   nothing happens, since the gradient is the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from trimtab.sharding.clock import Clock


@dataclass(kw_only=True)
class TensorGroup:
    """The ranks among which units are shared."""

    process_group: dist.ProcessGroup
    rank: int
    size: int
    clock: Clock | None = None
    """What measures the time between collectives, when something wants to know."""

    def __deepcopy__(self, _memo: Any) -> TensorGroup:
        """A copied model has the same ranks; its time is nobody's concern."""
        return TensorGroup(process_group=self.process_group, rank=self.rank, size=self.size)

    def all_reduce(self, tensor: Tensor) -> None:
        """Add up over the ranks, in place."""
        if self.size == 1:
            return
        if self.clock is None:
            dist.all_reduce(tensor, group=self.process_group)
            return
        with self.clock.collective():
            dist.all_reduce(tensor, group=self.process_group)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        if group.clock is not None:
            group.clock.compute_starts()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        group: TensorGroup = ctx.group
        if group.clock is not None:
            group.clock.compute_ends()
        # A copy: autograd may have handed the same tensor to others.
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        group.all_reduce(total)
        return total, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        if group.clock is not None:
            group.clock.compute_ends()
        total = y.detach().contiguous()
        group.all_reduce(total)  # in place: a product does not keep its result for its backward pass
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        group: TensorGroup = ctx.group
        if group.clock is not None:
            group.clock.compute_starts()
        return gradients[0], None


def enter(x: Tensor, group: TensorGroup) -> Tensor:
    """A block's input, the same on every rank."""
    return x if group.size == 1 and group.clock is None else _Enter.apply(x, group)  # type: ignore[no-untyped-call]


def leave(y: Tensor, group: TensorGroup) -> Tensor:
    """A block's output: the sum of what the ranks' units give."""
    return y if group.size == 1 and group.clock is None else _Leave.apply(y, group)  # type: ignore[no-untyped-call]
