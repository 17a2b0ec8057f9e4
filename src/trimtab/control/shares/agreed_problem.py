"""What forbids uneven batches on any rank, or shows only when ranks are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from trimtab.control.shares.counted_targets import UNEQUAL_TARGETS
from trimtab.control.shares.loss_form import LossForm

_OTHER_NUMBERS = "what the loss is a mean over, or multiplied or divided by, differs from rank to rank"


def agreed_problem(problem: str | None, targets: int | None, forms: Sequence[LossForm]) -> str | None:
    """The problem of the first rank that has one, or a difference between ranks. Collective.

    Args:
        targets: those of a sample that count.
        forms: of the losses that were looked at. A mean over as many values as the longest sample of a batch has, or
            a loss divided by its own value, differs between ranks.
    """
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (problem, targets, [form.numbers() for form in forms]))
    problems, counted, numbers = zip(*ranks, strict=True)
    if any(each != counted[0] for each in counted):
        return UNEQUAL_TARGETS
    named = next((each for each in problems if each is not None), None)
    return _OTHER_NUMBERS if named is None and any(each != numbers[0] for each in numbers) else named
