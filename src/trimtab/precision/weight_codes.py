"""The 8-bit operands of a weight, kept while gradients accumulate: micro-batches of a step share them.

Reusing operands of a weight that has changed would train with the old one, and nothing would show it: a write through
`.data` changes neither the weight's memory nor its version. So nothing is kept unless an optimizer is known to change
this weight, and then for no longer than that optimizer leaves between two steps. Operands are used again only if all of
this holds:

- a torch optimizer has made a step with this weight (a training loop without one never shares codes),
- no optimizer has made a step since they were made, and the last two steps were at least as many micro-batches apart,
- the weight is a leaf whose gradient is being accumulated, or it is the same call of the model (a recomputation),
- it is in the same memory, and its version is the same (in-place changes count it),
- no forward pass without gradients came in between, as evaluation with averaged weights does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
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
    """Of the model, when they were last used."""

    keeps: bool
    """Whether the operands are to be kept: only if they will be used again, because they take memory."""

    operands: Operands | None = None
    micro_batches: int = 1

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
        self._expected = 1
        """Micro-batches until the optimizer's next step: as many as before its last one."""

    def of(self, weight: Tensor, draw: Draw) -> Kept | None:
        """What is kept of this weight; None for one whose changes cannot be seen."""
        # One that is no leaf is computed anew in each call, as by torch.nn.utils.parametrize.
        if not weight.is_leaf or weight.is_inference():
            self.drop()
            return None
        kept = self._kept
        if kept is not None and kept.fits(weight, draw):
            if draw.calls is not kept.calls:
                kept.calls = draw.calls
                kept.micro_batches += 1
                if kept.micro_batches > self._expected:
                    kept.keeps, kept.operands = False, None
            return kept
        _steps.register()
        if kept is not None:
            self._expected = kept.micro_batches if _steps.of(weight) > kept.steps else 1
        storage = StorageWeakRef(weight.untyped_storage())
        self._kept = Kept(storage, weight._version, _steps.count, draw.calls, self._expected > 1)
        return self._kept

    def drop(self) -> None:
        """Forget them: what the weight will be next time is not known."""
        self._kept = None

    @property
    def nbytes(self) -> int:
        """Of the operands that are kept."""
        operands = () if self._kept is None else self._kept.operands or ()
        return sum(operand.nbytes for operand in operands)

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCodes, ()


class _Steps:
    """The steps of all optimizers: some change weights in ways that no version counts."""

    def __init__(self) -> None:
        self.count = 0
        self._registered = False
        self._last: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._by_weight: dict[int, int] = {}
        self._known = 0

    def register(self) -> None:
        if not self._registered:
            self._registered = True
            register_optimizer_step_post_hook(self._stepped)

    def of(self, weight: Tensor) -> int:
        """The number of the last step that an optimizer made with this weight; 0 if none did."""
        if self._known != self.count:
            self._known = self.count
            # An optimizer that exists holds its parameters, so no other object has their ids.
            self._by_weight = {
                id(parameter): count
                for optimizer, count in sorted(self._last.items(), key=lambda item: item[1])
                for group in optimizer.param_groups
                for parameter in group["params"]
            }
        return self._by_weight.get(id(weight), 0)

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        self.count += 1
        self._last[optimizer] = self.count


_steps = _Steps()
