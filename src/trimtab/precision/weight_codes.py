"""The 8-bit operands of a weight, kept while gradients accumulate: micro-batches of a step share them.

Reusing operands of a weight that has changed would train with the old one, and nothing would show it. So they are used
again only if all of this holds: the weight is a leaf whose gradient is being accumulated, it is in the same memory, its
version is the same (in-place changes count it), no optimizer has made a step since, and if there was no gradient yet,
it is the same call of the model (a recomputation in backward).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from trimtab.precision.draw import Draw
from trimtab.precision.products import Operands


@dataclass
class Kept:
    """What is known of the operands of one version of a weight."""

    storage: StorageWeakRef
    """Weak, so that memory is not held; but as long as this exists, no other storage is taken for it."""

    version: int
    steps: int
    calls: Tensor
    """Of the model when they were made."""

    keeps: bool
    """Whether the operands are to be kept: only if earlier ones were used again, because they take memory."""

    operands: Operands | None = None
    reused: bool = False

    def fits(self, weight: Tensor, draw: Draw) -> bool:
        """Whether these are operands of what the weight is now."""
        return (
            (weight.grad is not None or draw.calls is self.calls)
            and weight._version == self.version
            and _steps.count == self.steps
            and weight.untyped_storage()._cdata == self.storage.cdata
            and not self.storage.expired()
        )


class WeightCodes:
    """Keeps the operands of one operator's weight. Copies and pickles of it start empty."""

    def __init__(self) -> None:
        self._kept: Kept | None = None

    def of(self, weight: Tensor, draw: Draw) -> Kept | None:
        """What is kept of this weight; None for one whose changes cannot be seen."""
        # One that is no leaf is computed anew in each call, as by torch.nn.utils.parametrize.
        if not weight.is_leaf or weight.is_inference():
            self._kept = None
            return None
        kept = self._kept
        if kept is not None and kept.fits(weight, draw):
            if weight.grad is not None and draw.calls is not kept.calls:
                kept.reused = kept.keeps = True
            return kept
        _steps.register()
        storage = StorageWeakRef(weight.untyped_storage())
        keeps = kept is not None and kept.reused
        self._kept = Kept(storage, weight._version, _steps.count, draw.calls, keeps)
        return self._kept

    @property
    def nbytes(self) -> int:
        """Of the operands that are kept."""
        operands = () if self._kept is None else self._kept.operands or ()
        return sum(operand.nbytes for operand in operands)

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCodes, ()


class _Steps:
    """Counts the steps of all optimizers: some change weights in ways that no version counts."""

    def __init__(self) -> None:
        self.count = 0
        self._registered = False

    def register(self) -> None:
        if not self._registered:
            self._registered = True
            register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: object) -> None:
        self.count += 1


_steps = _Steps()
