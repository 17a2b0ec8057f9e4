"""What a script's losses show: the first ones whether its batches may be uneven, later ones whether that is still so.

Three batches with equal shares show it: one backward pass for each, a loss that is a mean or a sum, models that keep
samples apart. What speaks against it is noted, on this rank only; the ranks agree where the notes are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.control.shares.agreed_problem import agreed_problem
from trimtab.control.shares.between_samples import compares_samples
from trimtab.control.shares.counted_targets import CountedTargets
from trimtab.control.shares.cutting import CutBatch
from trimtab.control.shares.loss_form import LossForm
from trimtab.control.shares.sum_or_mean import SumOrMean
from trimtab.control.shares.trained_models import TrainedModels
from trimtab.control.shares.trainer_loss import OF_THIS_RANK, divided_by

OBSERVED = 3
"""Batches with equal shares that show whether a script can be cut."""


class ScriptLosses:
    """Follows the losses of a script, batch after batch."""

    def __init__(self, models: TrainedModels) -> None:
        self._models = models
        self.problem: str | None = None
        """Why batches must be equal on all ranks, as far as this one knows."""
        self.observed = 0
        """Batches so far that are to show whether the present loader can be cut."""
        self.scope: str | None = None
        """Whose tokens a framework asks the loss to be divided by, if not its own batch's; see `trainer_loss`."""
        self.items: Any = None
        self._of_items = False
        """Whether the loss was divided by these."""
        self._batch_size = 0
        self._first: LossForm | None = None
        self._forms: list[LossForm] = []
        """Those of the losses that were observed."""
        self._kind = SumOrMean()
        self._targets = CountedTargets()
        self._rows_are_samples = False
        """Whether the first axis of what the model is called with was its samples."""

    @property
    def are_known(self) -> bool:
        """Whether enough batches of the present loader were observed."""
        return self.observed >= OBSERVED

    def restart(self, batch_size: int) -> None:
        """Another loader or model comes; batches of the plain job have so many samples."""
        self._batch_size, self.observed = batch_size, 0
        self._rows_are_samples = False
        self._first = self.problem = None
        self._kind.forget()
        self._forms = []
        self._targets = CountedTargets()

    def note(self, problem: str | None) -> None:
        """Keep the first problem of all that are seen."""
        if self.problem is None:
            self.problem = problem

    def matcher(self, form: LossForm) -> Callable[[CutBatch], bool]:
        """Tells whether a loss of this form can be that of a batch."""
        values = {mean / self._batch_size for mean in self._first.means} if self._first is not None else set()

        def matches(batch: CutBatch) -> bool:
            if self._rows_are_samples and self._models.rows != batch.own:
                return False
            counts = {mean / batch.own for mean in form.means}
            return counts == values if values and counts else all(c == int(c) for c in counts)

        return matches

    def observe(self, loss: torch.Tensor, form: LossForm, batch: CutBatch, beside: str | None) -> None:
        """One more loss of a batch that is equal on all ranks; `beside` is what other loaders speak against it."""
        self.note(self._models.problem())
        self._kind.is_new(loss)
        self.note(compares_samples(loss, batch.own))
        self.note(beside)
        self._of_items = self.scope is not None and divided_by(form, self.items)
        if self._of_items:
            if self.scope == "this rank":
                self.note(OF_THIS_RANK)
        elif form.problem is not None:
            self.note(form.problem)
        elif batch.shares is not None:
            self._observe_form(form, batch.own)
        if batch.shares is not None:
            self._forms.append(form)
        same = self._models.rows == batch.own
        self._rows_are_samples = same and (self._rows_are_samples or self.observed == 0)
        self.observed += 1

    def _observe_form(self, form: LossForm, samples: int) -> None:
        if any(mean % samples for mean in form.means):
            self.note(f"the loss is a mean over {form.means[0]} values of {samples} samples")
        self.note(self._kind.observe(form, samples))
        if self._first is None:
            self._first = form
        elif form.means != self._first.means:
            self._first = LossForm()  # lengths vary
        self.note(self._targets.check(form, samples, wait=True))

    def follow(self, loss: torch.Tensor, form: LossForm, batch: CutBatch) -> None:
        """One more loss while batches may be uneven."""
        self.note(self._targets.check(form, batch.own))
        if batch.shares is not None and batch.own > 1 and not self._of_items:
            self.note(form.problem)
            if self._kind.is_new(loss):
                self.note(compares_samples(loss, batch.own))

    def look_at_targets(self, *, at_least: int = 0) -> None:
        """Look whether losses have ignored targets, if so many were not looked at yet. On a GPU this waits."""
        if self._targets.pending >= at_least:
            self.note(self._targets.problem())

    def weighs_alike(self, form: LossForm, batch: CutBatch, *, cut: bool) -> bool:
        """Whether a loss weighs the samples of all ranks alike by itself.

        Args:
            cut: the batch is of a loader whose batches may be cut, and its loss is compared with those before it.
        """
        if cut and batch.shares is not None:
            equal = batch.own == self._batch_size
            problem = self._kind.follow(form, batch.own, equal=equal)
            self.note(None if self._of_items else problem)
        summed = self._kind.is_sum(form, batch.own)
        return self._of_items or summed

    def agreed_problem(self) -> str | None:
        """The problem of the first rank that has one. Collective."""
        forms, self._forms = self._forms, []
        return agreed_problem(self.problem, self._targets.of_sample, forms, self._models.state())
