"""The local steps that run in this process, for those who only ask about them."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from torch import nn

from trimtab.model_state import find_state

if TYPE_CHECKING:
    from trimtab.control.local_steps import LocalSteps


class StepTimer(Protocol):
    """Times this rank's own work in a step: a loader that shares batches out by speed."""

    @property
    def follows_speeds(self) -> bool:
        """Whether batches will be such that all ranks take the same time."""

    def waiting(self) -> AbstractContextManager[None]:
        """Around what is not part of it."""


active: weakref.WeakKeyDictionary[LocalSteps, None] = weakref.WeakKeyDictionary()
"""In the order in which they were made, which is the same on all ranks."""


def running_local_steps() -> LocalSteps | None:
    """The local steps of this process; of several, those of the latest model: all have the same ranks."""
    return next(reversed(list(active)), None)


def begin_rounds(length: int) -> None:
    """Every model that trains with local steps takes so many in the round that begins.

    One that is in the middle of a round belongs to an earlier training, unless it is the latest.
    """
    latest = running_local_steps()
    for local in list(active):
        local.begin_round(length, earlier=local is not latest)


def averaging_ranks() -> tuple[int, ...] | None:
    """The ranks that average their gradients with this one in every step; None where all do."""
    local = running_local_steps()
    return None if local is None else local.team[0]


def local_steps_of(model: nn.Module) -> LocalSteps | None:
    """The local steps of a model, if it has any."""
    steps: LocalSteps | None = find_state(model, "local_steps")
    return steps
