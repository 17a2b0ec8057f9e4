"""What the Transformers Trainer divides a loss by: it passes this to `training_step`."""

from __future__ import annotations

import functools
import sys
from typing import Any, Protocol

from trimtab.control.shares.loss_form import LossForm

OF_THIS_RANK = "average_tokens_across_devices=False: the loss is divided by the tokens of each rank"


class Scoped(Protocol):
    """Whom it is told."""

    scope: str | None
    """"all ranks" or "this rank", whose tokens a loss is to be divided by; None if by its own batch."""

    items: Any
    """How many these are."""


def divided_by(form: LossForm, items: Any) -> bool:
    """Whether a loss is a sum that was divided by this number: a model or a `compute_loss` may as well ignore it."""
    if items is None or form.means or not form.divisors:
        return False
    return float(items) in (*map(float, form.divisors), *map(float, form.scales))


def watch_trainer(takeover: Scoped) -> None:
    """From here on the scope is known in every step of a Trainer, if this process has one."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is None or hasattr(trainer.training_step, "_trimtab"):
        return
    training_step = trainer.training_step

    @functools.wraps(training_step)
    def step(
        self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        of_all = getattr(self.args, "average_tokens_across_devices", False)
        takeover.scope = None if num_items_in_batch is None else "all ranks" if of_all else "this rank"
        takeover.items = num_items_in_batch
        return training_step(self, model, inputs, num_items_in_batch, *args, **kwargs)

    step._trimtab = True  # type: ignore[attr-defined]
    trainer.training_step = step
