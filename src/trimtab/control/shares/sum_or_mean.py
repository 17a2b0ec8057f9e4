"""Whether a loss is a sum over its samples or a mean over them, and whether it stays what it was found to be.

A mean may be written as a sum over the number of samples. The first batch of another size shows what that number is;
until then batches are equal, and both weigh samples alike.
"""

from __future__ import annotations

from fractions import Fraction

import torch

from trimtab.control.shares.loss_form import (
    DIVISOR_VARIES,
    OTHER_DIVISOR,
    LossForm,
    grows_with_samples,
    top_of,
)

CHANGED = "the loss is at times a mean over the batch and at times a sum"
FACTOR_VARIES = "the loss is a sum over the batch, times a number that varies"
HIDDEN_NUMBER = "the loss is multiplied by a tensor that may hold its number of samples"

_LOOKED_AT = 16
"""Graphs of a loss that are looked at, one for each kind that a script has."""


class SumOrMean:
    """Follows the forms of a script's losses, batch after batch."""

    def __init__(self) -> None:
        self.summed: bool | None = None
        """Whether the loss is a sum; known with the first batch of another size."""
        self._first: LossForm | None = None
        self._equal: tuple[LossForm, int] | None = None
        """The form of the last loss of as many samples as in the plain job, and these."""
        self._is_current = False
        """Whether that loss was of the present loader and model."""
        self._by_samples = self._by_number = False
        """What divides a sum: a number that grows with the samples, or one that does not."""
        self._tops: set[tuple[str, ...]] = set()

    def forget(self) -> None:
        """Another loader or model comes."""
        self.summed = self._first = None
        self._is_current = False
        self._tops.clear()

    def is_new(self, loss: torch.Tensor) -> bool:
        """Whether no loss with such a graph was looked at, as where a script adds a term after some epochs."""
        top = top_of(loss)
        if top in self._tops or len(self._tops) >= _LOOKED_AT:
            return False
        self._tops.add(top)
        return True

    def observe(self, form: LossForm, samples: int) -> str | None:
        """What is wrong with the loss of a batch that is still equal on all ranks."""
        if self._first is None:
            self._first = form
        if form.divisors:
            if form.divisors != self._first.divisors:
                return DIVISOR_VARIES
            if form.factors != self._first.factors and not _may_be_samples(form.divisors, samples):
                return FACTOR_VARIES
        if any(_may_hold(float(value), form, samples) for value in form.hidden):
            return HIDDEN_NUMBER
        return None

    def follow(self, form: LossForm, samples: int, *, equal: bool) -> str | None:
        """One more batch, `equal` if it has as many samples as in the plain job; what is wrong with its loss."""
        problem = self._problem(form, samples, equal=equal)
        if equal:
            self._equal, self._is_current = (form, samples), True
        return problem

    def _problem(self, form: LossForm, samples: int, *, equal: bool) -> str | None:
        if self._equal is None or (equal and not self._is_current):
            return None
        before, count = self._equal
        if samples == 1 < count:  # torch leaves no trace of how one value was reduced
            return OTHER_DIVISOR if self.summed is None and before.divisors else None
        if bool(form.divisors) != bool(before.divisors):
            return CHANGED
        by_number = set(form.divisors) == set(before.divisors)
        if equal:
            return None if by_number else DIVISOR_VARIES
        by_samples = _each(form.divisors, samples) == _each(before.divisors, count)
        if self.summed is None:
            self.summed = grows_with_samples(form, before, samples / count)
            if self.summed is None and form.divisors and by_samples and samples != count:
                self.summed = False  # what else it is multiplied by varies, as in annealing
            self._by_samples, self._by_number = by_samples, by_number
            return OTHER_DIVISOR if self.summed is None else None
        alike = by_samples if self._by_samples else by_number if self._by_number else True
        return None if alike else DIVISOR_VARIES

    def is_sum(self, form: LossForm, samples: int) -> bool:
        """Whether this loss weighs samples alike by itself, as far as is known."""
        if samples == 1 and self._equal is not None:
            form, samples = self._equal
        changed = self._equal is not None and bool(form.divisors) != bool(self._equal[0].divisors)
        if self.summed is None or changed:
            return bool(form.divisors) and not _may_be_samples(form.divisors, samples)
        return self.summed


def _each(divisors: tuple[int, ...], samples: int) -> set[Fraction]:
    return {Fraction(divisor, samples) for divisor in divisors}


def _may_be_samples(divisors: tuple[int, ...], samples: int) -> bool:
    return samples > 1 and all(divisor % samples == 0 for divisor in divisors)


def _may_hold(value: float, form: LossForm, samples: int) -> bool:
    """Whether a sum was multiplied by a number that makes it a mean, or the other way around.

    A GradScaler's number is a power of two, and not below 1.
    """
    if form.means:
        return value == samples > 1
    return value < 1 or not (value.is_integer() and int(value) & (int(value) - 1) == 0)
