"""Targets that a loss ignores: a mean over the others weighs samples alike only if each has as many of them."""

from __future__ import annotations

import torch

from trimtab.control.shares.loss_form import LossForm

UNEQUAL_TARGETS = "some targets are ignored, so the loss is a mean over tokens and not over samples"


class CountedTargets:
    """Whether losses count equally many targets of every sample."""

    def __init__(self) -> None:
        self.of_sample: int | None = None
        """Those of a sample that count: a causal language model has none for the last token."""
        self._unequal: list[torch.Tensor] = []
        """For recent losses, whether they counted more or fewer of some samples than of others."""

    @property
    def pending(self) -> int:
        """Losses that were not looked at yet."""
        return len(self._unequal)

    def check(self, form: LossForm, samples: int, *, wait: bool = False) -> str | None:
        """Note one more loss of so many samples; what is wrong if that is known, or if `wait`."""
        for counted, count in form.counted:
            if self.of_sample is None:
                self.of_sample = int(counted) // samples
            self._unequal.append((counted != count) & (counted != self.of_sample * samples))
        on_cpu = any(each.device.type == "cpu" for each in self._unequal)
        return self.problem() if wait or on_cpu else None

    def problem(self) -> str | None:
        """What is wrong with the pending losses. On a GPU this waits for the last step."""
        unequal, self._unequal = self._unequal, []
        return UNEQUAL_TARGETS if any(map(bool, unequal)) else None
