"""The ranks that share one model, and their collectives at the two ends of a block.

Each block of units needs one all-reduce in forward and one in backward, whatever the assignment:

1. `enter`: every rank has the same input. Forward does nothing; backward all-reduces the gradient of the input, to
   which each rank contributes that of its own units (`trimtab.sharding.overlap` does so for inputs of projections).
2. `leave`: every rank has the sum over its own units. Forward all-reduces the sums; backward does nothing, since
   the gradient is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.sharding.clock import Clock


@dataclass(kw_only=True)
class TensorGroup:
    """The ranks over which units are sharded."""

    process_group: dist.ProcessGroup
    rank: int
    size: int
    clock: Clock | None = None
    """Times the compute between collectives, if set."""

    aside: dist.ProcessGroup | None = None
    """A second group of the same ranks: the collectives of one group run one after the other."""

    simulated: int = 1
    """Ranks that are computed one after the other in this process: sums over ranks count what is here as often."""

    overlap: bool = True
    """Whether weights' gradients are computed while the gradient of a block's input is summed over the ranks."""

    @property
    def side(self) -> dist.ProcessGroup:
        """For what may travel while the all-reduces of blocks do."""
        return self.process_group if self.aside is None else self.aside

    def __deepcopy__(self, _memo: Any) -> TensorGroup:
        """A copied model has the same ranks; its time is nobody's concern."""
        return TensorGroup(
            process_group=self.process_group, rank=self.rank, size=self.size, overlap=self.overlap
        )

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place."""
        if self.size > 1:
            with self.timed():
                dist.all_reduce(tensor, group=self.process_group)

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Start to sum over the ranks, in place; returns what waits for the sum."""
        if self.size == 1:
            return lambda: None
        return self.waiting(dist.all_reduce(tensor, group=self.process_group, async_op=True))

    def waiting(self, work: dist.Work | None) -> Callable[[], None]:
        """A function that waits for a collective."""

        def wait() -> None:
            with self.timed():
                if work is not None:
                    work.wait()

        return wait

    def timed(self) -> AbstractContextManager[None]:
        """Count a collective's time, if there is a clock."""
        return nullcontext() if self.clock is None else self.clock.collective()

    def compute_starts(self) -> None:
        if self.clock is not None:
            self.clock.compute_starts()

    def compute_ends(self) -> None:
        if self.clock is not None:
            self.clock.compute_ends()

    def require_agreement(self, settings: bytes, device: torch.device, *, differs: str, lost: str) -> None:
        """Raise on every rank if some rank has other settings than rank 0. One all-gather of 32 bytes.

        Args:
            differs: message with the first such rank in place of {rank}.
            lost: message if a rank is gone.
        """
        if self.size == 1:
            return
        own = torch.frombuffer(bytearray(sha256(settings).digest()), dtype=torch.uint8).to(device)
        digests = [torch.empty_like(own) for _ in range(self.size)]
        try:
            dist.all_gather(digests, own, group=self.process_group)
        except RuntimeError as error:
            raise TrimtabError(lost) from error
        for rank, other in enumerate(digests):
            if not torch.equal(other, digests[0]):
                raise TrimtabError(differs.format(rank=rank))


def refuse_second_derivatives() -> None:
    """Raise in a backward pass that is itself recorded: collectives in it are not differentiable."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise TrimtabError(
            "tensor_parallel: backward with create_graph=True through a tensor-parallel block: second derivatives "
            "(a gradient penalty, say) are not supported there; leave create_graph out, or keep the module whole "
            "with tensor_parallel(..., replicate=[...])"
        )


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        group.compute_starts()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        group: TensorGroup = ctx.group
        refuse_second_derivatives()
        group.compute_ends()
        # A copy: autograd may use the same tensor elsewhere.
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        group.all_reduce(total)
        return total, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        group.compute_ends()
        total = y.detach().contiguous()
        group.all_reduce(total)  # in place: backward of a product does not need its result
        return no_view(total)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        group: TensorGroup = ctx.group
        refuse_second_derivatives()
        group.compute_starts()
        return gradients[0], None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: TensorGroup) -> Tensor:
        total = y.detach().contiguous()
        group.all_reduce(total)
        return no_view(total)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivatives()
        return gradients[0], None


class _Simulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.simulated = group.simulated
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.simulated, None


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        group.compute_ends()
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.group.compute_starts()
        return gradients[0], None


def no_view(y: Tensor) -> Tensor:
    """The same memory, as a result that the model may change in place: autograd forbids that for a view."""
    return torch.ops.aten._unsafe_view.default(y, y.shape)  # type: ignore[no-any-return]


def enter(x: Tensor, group: TensorGroup) -> Tensor:
    """A block's input, the same on every rank."""
    if group.simulated > 1:
        return _Simulated.apply(x, group)  # type: ignore[no-any-return,no-untyped-call]
    return x if group.size == 1 and group.clock is None else _Enter.apply(x, group)  # type: ignore[no-untyped-call]


def leave(y: Tensor, group: TensorGroup) -> Tensor:
    """A block's output: the sum over the units of all ranks."""
    return y if group.size == 1 and group.clock is None else _Leave.apply(y, group)  # type: ignore[no-untyped-call]


def apart(y: Tensor, group: TensorGroup) -> Tensor:
    """A block's output that stays on its rank: only the clock stops."""
    return y if group.clock is None else _Apart.apply(y, group)  # type: ignore[no-untyped-call]


def summed(y: Tensor, group: TensorGroup) -> Tensor:
    """The sum over all ranks of what takes no time to compute: as `leave`, without the clock."""
    return y if group.size == 1 else _Summed.apply(y, group)  # type: ignore[no-untyped-call]
