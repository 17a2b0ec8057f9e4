"""Keeps a plan's damages current: samples how sensitive operators are, in few of a job's steps."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from torch import nn

from trimtab.environment import logger
from trimtab.measure.damage.sampled import SampledStep
from trimtab.planning.plan import Plan
from trimtab.planning.precision.current_damage import growth
from trimtab.precision_names import OWN
from trimtab.predict.damage import Damage, Sensitivity

SHARE = 0.005
"""The part of a job's time that samples may take."""

FIRST_STEP = 2
"""Steps before the first sample: the first ones are slow for other reasons."""

MEMORY = 0.5
"""Weight of an operator's earlier samples."""


class SensitivityWatch:
    """Of one rank's model: ranks have the same weights and like samples, so that one may speak for all."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model = model
        self._steps, self._due = 0, 0.0
        self._began, self._usual_s = time.perf_counter(), 0.0
        self._spent_s, self.samples = 0.0, 0
        self._first: dict[str, Sensitivity] = {}
        self._now: dict[str, Sensitivity] = {}
        self._sampled = SampledStep(model, {})
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """Compare with what is sampled from now on: a new plan's damages are those of this moment."""
        self._sampled.end()
        offered: dict[str, set[str]] = {}
        for role in plan.roles.values():
            for operator, by in role.choices.items():
                offered.setdefault(operator, set()).update(p for p in by if p != OWN)
        known = {name for name, _ in self._model.named_modules()}
        wanted = {name: sorted(several) for name, several in offered.items() if several and name in known}
        self._sampled = SampledStep(self._model, wanted)
        self._wanted = bool(wanted)
        self._first, self._now = {}, {}

    def close(self) -> None:
        """Sample no more."""
        self._sampled.end()
        self._wanted = False

    def growth(self) -> Damage:
        """By operator and precision, how many times the plan's damage it does by now."""
        return growth(self._first, self._now)

    def between(self) -> bool:
        """Between two steps: begins a sample when one is due. Returns whether the last step was sampled."""
        now = time.perf_counter()
        step_s, self._began = now - self._began, now
        self._steps += 1
        was_sampled = self._spent_s > 0
        if was_sampled:
            # What the step took longer than the one before, at least the arithmetic at its end.
            self._due = now + max(self._spent_s, step_s - self._usual_s) / SHARE
            self._spent_s = 0.0
        else:
            self._usual_s = step_s
        if self._wanted and self._steps >= FIRST_STEP and now >= self._due and not _compiled():
            self._sampled.begin()
        return was_sampled

    def ends(self) -> None:
        """After the optimizer's step: reads what was recorded, if anything was."""
        if not self._sampled.open:
            return
        start = time.perf_counter()
        try:
            found = self._sampled.end()
        except Exception as error:  # the training must not stop because of it
            logger().debug("plan: sampling how sensitive operators are failed: %r", error)
            self._wanted, found = False, {}
        for name, own in found.items():
            self._first.setdefault(name, own)
            self._now[name] = _mixed(self._now.get(name, own), own)
        self.samples += 1
        self._spent_s = time.perf_counter() - start


def _mixed(before: Sensitivity, now: Sensitivity) -> Sensitivity:
    return replace(
        now,
        size=MEMORY * before.size + (1 - MEMORY) * now.size,
        errors={
            p: MEMORY * before.errors.get(p, error) + (1 - MEMORY) * error for p, error in now.errors.items()
        },
    )


def _compiled() -> bool:
    """Whether this process has compiled models: a hook inside one would compile it again."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters.get("frames", {}).get("total", 0))
