"""Activations divided along the sequence, and the collectives between whole and divided ones.

A rank has some consecutive places of every sequence, more or fewer according to its units. Four functions lead from
one form to the other, and the backward pass of each is the forward pass of another:

| | forward | backward |
|---|---|---|
| `gather` | for this rank's units: all-gather | reduce-scatter |
| `scatter` | partial sums of every rank: reduce-scatter | all-gather |
| `cut` | the same on every rank: take the own places | all-gather |
| `join` | for what every rank does alike: all-gather | take the own places |
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from trimtab._compat import all_gather_single, reduce_scatter_single
from trimtab.sharding.group import refuse_second_derivatives

if TYPE_CHECKING:
    from trimtab.sharding.group import TensorGroup
    from trimtab.sharding.overlap import Way
    from trimtab.sharding.unit_block import ShardedModel

AXIS = 1
"""Axis of the places in activations of (samples, places, width)."""


class Sequence:
    """How the ranks divide sequences: as they divide the units of the model, on average over its blocks."""

    def __init__(self, sharded: ShardedModel) -> None:
        self.sharded = sharded
        self.samples = self.places = 0
        """Shape of the whole activations in the current layer."""

        self.local = False
        """Whether activations are divided where the forward pass is now."""

        self.gathered: list[Tensor] = []
        """Inputs of the current block that were gathered in front of it."""

        self._kept: dict[int, _Kept] = {}
        """The own places of the inputs of the current block, by address of the gathered ones."""

        self._local: dict[int, Tensor] = {}
        """The inputs of the current block that were gathered, by the same address."""

    @property
    def group(self) -> TensorGroup:
        return self.sharded.group

    def counts(self, places: int) -> list[int]:
        """The places of each rank; the same on every rank."""
        tables = [block.table for block in self.sharded.blocks.values() if not block.vocabulary]
        shares = (
            sum(table.counts[rank] / table.units for table in tables) / len(tables)
            for rank in range(self.group.size)
        )
        ends = [round(places * part) for part in accumulate(shares)]
        ends[-1] = places
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def own(self, places: int) -> range:
        """The places of this rank."""
        counts = self.counts(places)
        start = sum(counts[: self.group.rank])
        return range(start, start + counts[self.group.rank])

    @contextmanager
    def layer(self, samples: int, places: int) -> Iterator[None]:
        """Inside a layer whose activations are divided."""
        with self.unchanged():
            self.samples, self.places, self.local, self.gathered = samples, places, True, []
            yield

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Afterwards the forward pass is where it was before."""
        before = self.samples, self.places, self.local, self.gathered
        try:
            yield
        finally:
            self.samples, self.places, self.local, self.gathered = before
            self._kept, self._local = {}, {}  # a pass that ended early leaves addresses behind

    def gather(self, local: Tensor) -> Tensor:
        """All places of a block's input; its gradient is summed over the ranks."""
        self.local = False
        counts = self.counts(self.places)
        by_sample = self.by_sample(local, counts[self.group.rank])
        kept = _Kept(counts, self.group)
        full: Tensor = _Gather.apply(by_sample, kept)  # type: ignore[no-untyped-call]
        address = full.untyped_storage().data_ptr()
        self._kept[address], self._local[address] = kept, by_sample
        return full.flatten(0, 1) if local.ndim == 2 else full

    def way_of(self, full: Tensor) -> tuple[Tensor, Way]:
        """A gathered input as it was before, and how its gradient gets back to there."""
        address = full.untyped_storage().data_ptr()
        return self._local[address], self._kept[address]

    def saving(self) -> AbstractContextManager[None]:
        """Of gathered inputs the backward pass keeps only the own places, and gathers them once more."""
        if self.group.size == 1:
            return nullcontext()

        def pack(saved: Tensor) -> Any:
            kept = self._kept.get(saved.untyped_storage().data_ptr())
            return saved if kept is None else (kept, saved.shape)

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            kept, shape = packed
            return kept.full().view(shape)  # type: ignore[no-any-return]

        return saved_tensors_hooks(pack, unpack)

    def scatter(self, partial: Tensor) -> Tensor:
        """This rank's places of a block's output, summed over the ranks."""
        self.local, self.gathered, self._kept, self._local = True, [], {}, {}
        by_sample = self.by_sample(partial, self.places)
        own: Tensor = _Scatter.apply(by_sample, self.counts(self.places), self.group)  # type: ignore[no-untyped-call]
        return own.flatten(0, 1) if partial.ndim == 2 else own

    def by_sample(self, x: Tensor, places: int) -> Tensor:
        """Activations with an axis for samples; some layers flatten it."""
        return x.view(self.samples, places, x.shape[-1]) if x.ndim == 2 else x

    def cut(self, full: Tensor) -> Tensor:
        """This rank's places of what is the same on every rank."""
        return _Cut.apply(full, self.counts(full.shape[AXIS]), self.group)  # type: ignore[no-any-return,no-untyped-call]

    def join(self, local: Tensor, places: int) -> Tensor:
        """All places, for what every rank computes alike."""
        return _Join.apply(local, self.counts(places), self.group)  # type: ignore[no-any-return,no-untyped-call]


@dataclass(eq=False)
class _Kept:
    """A gathered input, of which only the own places are kept: a `Way` into a block."""

    counts: list[int]
    group: TensorGroup
    node: weakref.ref[Any] | None = None
    """The node of the graph that has them."""

    local: Tensor | None = None
    """They themselves, if there is no such node."""

    again: Tensor | None = None
    """All places, while the backward pass of the block needs them."""

    samples: int = 0

    def keep(self, ctx: Any, x: Tensor) -> None:
        ctx.save_for_backward(x)  # where activation checkpointing and the like can see it
        self.local = None if ctx.needs_input_grad[0] else x
        self.node, self.samples = weakref.ref(ctx), x.shape[0]

    def start(self, gradient: Tensor) -> Callable[[], Tensor]:
        self.again = None
        by_sample = gradient.reshape(self.samples, sum(self.counts), gradient.shape[-1])
        return _start_reduce_scatter(by_sample, self.counts, self.group)

    def full(self) -> Tensor:
        if self.again is None:
            self.group.compute_ends()
            node: Any = None if self.node is None else self.node()
            local = node.saved_tensors[0] if self.local is None else self.local
            self.again = _all_gather(local, self.counts, self.group)
            self.group.compute_starts()
        return self.again


def _take(full: Tensor, counts: list[int], group: TensorGroup) -> Tensor:
    return full.narrow(AXIS, sum(counts[: group.rank]), counts[group.rank]).clone(
        memory_format=torch.contiguous_format
    )


def _all_gather(local: Tensor, counts: list[int], group: TensorGroup) -> Tensor:
    """All places, from those of every rank; shorter parts are padded on the wire."""
    if group.size == 1:
        return local.view_as(local)
    longest = max(counts)
    sent = local.contiguous()
    if local.shape[AXIS] < longest:
        shape = (local.shape[0], longest, *local.shape[2:])
        sent = local.new_zeros(shape)
        sent[:, : local.shape[AXIS]] = local
    received = sent.new_empty((group.size, *sent.shape))
    with group.timed():
        all_gather_single(received.flatten(0, 1), sent, group.process_group)
    return torch.cat([received[rank, :, :count] for rank, count in enumerate(counts)], dim=AXIS)


def _reduce_scatter(partial: Tensor, counts: list[int], group: TensorGroup) -> Tensor:
    """The sum over the ranks, of this rank's places."""
    return _start_reduce_scatter(partial, counts, group)()


def _start_reduce_scatter(partial: Tensor, counts: list[int], group: TensorGroup) -> Callable[[], Tensor]:
    """Start `_reduce_scatter`; returns what waits for the sum."""
    if group.size == 1:
        return partial.clone  # a layer may change it in place
    sent = torch.cat([part.flatten() for part in partial.split(counts, dim=AXIS)])
    shape = (partial.shape[0], counts[group.rank], *partial.shape[2:])
    if len(set(counts)) == 1 and dist.get_backend(group.process_group) == "nccl":
        received = sent.new_empty((1, *shape))
        wait = group.waiting(
            reduce_scatter_single(received, sent, group.process_group, dist.ReduceOp.SUM, async_op=True)
        )
    else:
        place = partial.numel() // max(1, partial.shape[AXIS])
        received = sent.new_empty((group.size, *shape))
        own = [counts[group.rank] * place] * group.size
        out = [count * place for count in counts]
        wait = group.waiting(
            dist.all_to_all_single(
                received.view(-1), sent, own, out, group=group.process_group, async_op=True
            )
        )

    def finish() -> Tensor:
        wait()
        return received.sum(0) if len(received) > 1 else received[0]

    return finish


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, kept: _Kept) -> Tensor:
        ctx.kept = kept
        kept.keep(ctx, local)
        full = _all_gather(local, kept.counts, kept.group)
        kept.group.compute_starts()
        return full

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivatives()
        kept: _Kept = ctx.kept
        kept.group.compute_ends()
        return kept.start(gradients[0])(), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, counts: list[int], group: TensorGroup) -> Tensor:
        ctx.counts, ctx.group = counts, group
        group.compute_ends()
        return _reduce_scatter(partial, counts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivatives()
        full = _all_gather(gradients[0], ctx.counts, ctx.group)
        ctx.group.compute_starts()
        return full, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, counts: list[int], group: TensorGroup) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _take(full, counts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivatives()
        return _all_gather(gradients[0], ctx.counts, ctx.group), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, counts: list[int], group: TensorGroup) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _all_gather(local, counts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivatives()
        return _take(gradients[0], ctx.counts, ctx.group), None, None


class _Shared(torch.autograd.Function):
    """Parameters that all places share: each rank has the gradient of its own places, and one all-reduce sums them."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        present = [gradient for gradient in gradients if gradient is not None]
        if not present:
            return None, *gradients
        total = torch.cat([gradient.flatten() for gradient in present])
        ctx.group.all_reduce(total)
        parts = iter(total.split([gradient.numel() for gradient in present]))
        return None, *(None if g is None else next(parts).view_as(g) for g in gradients)


def shared(parameters: list[Tensor], group: TensorGroup) -> tuple[Tensor, ...]:
    """Parameters to compute the own places with; their gradients are summed over the ranks."""
    if group.size == 1 or not torch.is_grad_enabled():
        return tuple(parameters)
    return _Shared.apply(group, *parameters)  # type: ignore[no-any-return,no-untyped-call]
