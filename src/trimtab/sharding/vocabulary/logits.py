"""Logits of which each rank has those of its part of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trimtab.sharding.group import refuse_second_derivatives
from trimtab.sharding.sequence.divided import DividedTensor
from trimtab.sharding.vocabulary.slots import Slots

_SHAPES = frozenset((Tensor.view, Tensor.reshape, Tensor.flatten, torch.flatten, torch.reshape))
_BY_VALUE = frozenset(
    (
        Tensor.float, Tensor.double, Tensor.to, Tensor.contiguous, Tensor.clone, Tensor.detach, Tensor.tanh, torch.tanh,
        Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.div, Tensor.__truediv__, Tensor.type_as,
    )
)  # fmt: skip


class VocabularyLogits(DividedTensor):
    """Represents all logits; only this rank's are here.

    `cross_entropy` computes its loss from them without gathering the others. Reshaping and slicing in front of the
    vocabulary and scaling keep them apart. Anything else gathers all logits, on every rank: a collective.
    """

    slots: Slots

    @staticmethod
    def __new__(cls, local: Tensor, slots: Slots) -> VocabularyLogits:
        self: VocabularyLogits = torch.Tensor._make_wrapper_subclass(
            cls, (*local.shape[:-1], slots.block.units), dtype=local.dtype, device=local.device
        )
        self.local, self.slots = local, slots
        return self

    @classmethod
    def _function(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if func is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        return super()._function(func, args, kwargs)

    def _apart(self, func: Any, args: Any, kwargs: Any) -> Any:
        others = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.ndim > 0]
        if func in _BY_VALUE and not others:
            return VocabularyLogits(func(self.local, *args, **kwargs), self.slots)
        if func in _SHAPES and not any(isinstance(each, torch.dtype) for each in args):
            shape = func(torch.empty(self.shape, device="meta"), *args, **kwargs).shape
            if shape and shape[-1] == self.shape[-1]:
                return VocabularyLogits(self.local.reshape(*shape[:-1], self.local.shape[-1]), self.slots)
        if func is Tensor.__getitem__ and _in_front(args[0], self.ndim):
            return VocabularyLogits(self.local[args[0]], self.slots)
        return NotImplemented

    def whole(self) -> Tensor:
        """All logits. Every rank calls it."""
        return _Whole.apply(self.local, self.slots)  # type: ignore[no-any-return,no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"VocabularyLogits({tuple(self.shape)}, {self.local.shape[-1]} here)"


def _in_front(index: Any, axes: int) -> bool:
    """Whether an index leaves the last axis as it is."""
    items = index if isinstance(index, tuple) else (index,)
    if any(not (item is None or item is Ellipsis or isinstance(item, (int, slice))) for item in items):
        return False
    taken = [item for item in items if item is not None]
    if Ellipsis in taken:
        return taken[-1] in (Ellipsis, slice(None))
    return len(taken) < axes or taken[-1] == slice(None)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, slots: Slots) -> Tensor:
        ctx.owned = owned = slots.owned
        full = local.new_zeros((*local.shape[:-1], slots.block.units))
        full[..., owned] = local
        slots.block.group.all_reduce(full)
        return full

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivatives()
        # What follows is the same on every rank, and so is the gradient.
        return gradients[0][..., ctx.owned], None


def _cross_entropy(
    input: Any,  # noqa: A002 - as torch calls it
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`F.cross_entropy` of logits that are apart; NotImplemented for what needs them whole."""
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0
    if not plain or not isinstance(input, VocabularyLogits) or input.ndim != 2 or target.ndim != 1:
        return NotImplemented
    if isinstance(target, VocabularyLogits) or target.is_floating_point():
        return NotImplemented
    local = input.local
    if torch.is_autocast_enabled(local.device.type):
        local = local.float()
    kept = target != ignore_index
    slots = input.slots.of(target.where(kept, target.new_zeros(())))
    losses: Tensor = _CrossEntropy.apply(local, slots.where(kept, slots.new_tensor(-1)), kept, input.slots)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    return losses.sum() / kept.sum() if reduction == "mean" else losses.sum()


class _CrossEntropy(torch.autograd.Function):
    """The loss of each row, from this rank's logits: two small all-reduces, and none in the backward pass."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, slots: Tensor, kept: Tensor, vocabulary: Slots) -> Tensor:
        group = vocabulary.block.group
        values = local.float() if local.dtype in (torch.float16, torch.bfloat16) else local
        some = values.shape[-1] > 0
        largest = values.amax(-1) if some else values.new_full(values.shape[:-1], -torch.inf)
        if group.size > 1:
            with group.timed():
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group.process_group)
        sums = (values - largest.unsqueeze(-1)).exp().sum(-1)
        chosen = values.new_zeros(values.shape[:-1])
        if some:
            here = values.gather(-1, slots.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            chosen = here.where(slots >= 0, chosen)
        both = torch.stack([sums, chosen])
        group.all_reduce(both)
        normalizer = largest + both[0].log()
        ctx.save_for_backward(local, slots, kept, normalizer)
        return (normalizer - both[1]).where(kept, chosen.new_zeros(())).to(local.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        local, slots, kept, normalizer = ctx.saved_tensors
        gradient = (local.to(normalizer.dtype) - normalizer.unsqueeze(-1)).exp_()
        if gradient.shape[-1] > 0:
            ones = (slots >= 0).to(gradient.dtype).unsqueeze(-1)
            gradient.scatter_add_(-1, slots.clamp(min=0).unsqueeze(-1), -ones)
        scale = gradients[0].to(gradient.dtype).where(kept, gradient.new_zeros(()))
        return gradient.mul_(scale.unsqueeze(-1)).to(local.dtype), None, None, None
