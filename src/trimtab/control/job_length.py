"""How many steps a job will have, where something knows it: for the time that is left in the live view.

In this order: the Trainer of Transformers or Lightning, a flag of the script (`--max-steps 500`; `--epochs 3` times the
length of its data loader), and otherwise the loader alone, which tells when the epoch ends.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import weakref
from contextlib import suppress
from typing import Any, ClassVar

from torch import nn
from torch.utils.data import DataLoader

_FLAG = re.compile(r"(?:(?:num|max|total|n)_)?(?:(?:train|training)_)?(epochs|steps|iters|iterations)")


class _Seen:
    """What this process iterates over, and the state of a Transformers Trainer."""

    epochs: ClassVar[list[tuple[weakref.ref[Any], int]]] = []
    """Iterators of data loaders with their numbers of batches, the newest last."""

    trainer_state: Any = None


def observe_loaders() -> None:
    """From now on, remember the iterators that data loaders make."""
    begin = DataLoader.__iter__
    if hasattr(begin, "__wrapped__"):
        return

    @functools.wraps(begin)
    def begin_epoch(self: DataLoader[Any]) -> Any:
        iterator = begin(self)
        with suppress(TypeError):  # a data set without a length
            alive = [(ref, length) for ref, length in _Seen.epochs if ref() not in (None, iterator)]
            _Seen.epochs = [*alive[-7:], (weakref.ref(iterator), len(self))]
        return iterator

    DataLoader.__iter__ = begin_epoch  # type: ignore[method-assign]


class JobLength:
    """Follows the steps of a model on rank 0."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._epochs_wanted, self._steps_wanted = requested_length(sys.argv[1:])
        self._batches: tuple[Any, int, int] | None = None
        """The iterator that the last step's batch came from, how many batches it had delivered, and the step."""
        self._per_step: int | None = None
        """Batches of a step: more than one where gradients are accumulated."""
        _watch_trainer()

    def after(self, step: int) -> dict[str, int | None]:
        """How many steps there will be, and with which the epoch ends, as known after this step; None if unknown."""
        length, left = self._epoch(step)
        per_step = self._per_step
        ends = None if left is None or per_step is None else step + math.ceil(left / per_step)
        total = self._of_trainer(step) or self._steps_wanted
        if total is None and self._epochs_wanted is not None and length is not None and per_step is not None:
            total = math.ceil(self._epochs_wanted * math.ceil(length / per_step))
        return {
            "total_steps": total if total is not None and total >= step else None,
            "epoch_ends": ends,
        }

    def _epoch(self, step: int) -> tuple[int | None, int | None]:
        """Batches of the epoch, and those that are left; None where the data is not known."""
        before, delivered = self._batches, {}
        for ref, length in _Seen.epochs:
            iterator = ref()
            if iterator is not None:
                delivered[iterator] = int(getattr(iterator, "_num_yielded", 0)), length
        if before is not None and before[0]() in delivered:
            count, length = delivered[before[0]()]
            if count > before[1]:  # otherwise it is another loader that the script trains on now
                if self._per_step is None or count < length:  # the last step of an epoch may have fewer
                    self._per_step = max(1, round((count - before[1]) / max(step - before[2], 1)))
                self._batches = before[0], count, step
                return length, length - count
        newest = next((i for i in reversed(delivered) if delivered[i][0]), None)
        if newest is None:
            return None, None
        count, length = delivered[newest]
        self._batches = weakref.ref(newest), count, step
        return length, length - count

    def _of_trainer(self, step: int) -> int | None:
        """The job's steps as a Trainer counts them; a resumed job has some of them behind it."""
        module = getattr(self._model(), "module", self._model())
        # There may be no Trainer, or none that we know, or one whose data has no end.
        with suppress(AttributeError, RuntimeError, TypeError, ArithmeticError):
            trainer: Any = _Seen.trainer_state or module.trainer  # type: ignore[union-attr]  # Lightning's
            most = trainer.max_steps
            if most <= 0 and trainer.max_epochs > 0:
                steps = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
                most = trainer.max_epochs * steps
            if 0 < most < math.inf:
                return step - 1 + int(most - trainer.global_step)
        return None


def requested_length(arguments: list[str]) -> tuple[float | None, int | None]:
    """Epochs and steps that a script's flags name: `--epochs 3`, `--num_train_epochs=3`, `--max-steps 500`."""
    epochs, steps = None, None
    for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        flag = _FLAG.fullmatch(name.lstrip("-").replace("-", "_")) if name.startswith("-") else None
        number = re.fullmatch(r"\d{1,12}(?:\.\d+)?", value if equals else following)
        if flag is None or number is None or not float(number[0]):
            continue
        if flag[1] == "epochs":
            epochs = float(number[0])
        else:
            steps = int(float(number[0]))
    return epochs, steps


def _watch_trainer() -> None:
    """Learn the state of the Transformers Trainer, which it passes to its callbacks before the first step."""
    handler = getattr(sys.modules.get("transformers.trainer_callback"), "CallbackHandler", None)
    if handler is None or hasattr(handler.on_train_begin, "__wrapped__"):
        return
    begin = handler.on_train_begin

    @functools.wraps(begin)
    def on_train_begin(self: Any, args: Any, state: Any, control: Any, *rest: Any, **more: Any) -> Any:
        _Seen.trainer_state = state
        return begin(self, args, state, control, *rest, **more)

    handler.on_train_begin = on_train_begin
