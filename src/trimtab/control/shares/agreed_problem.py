"""What forbids uneven batches on any rank, or shows only when ranks are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from trimtab.control.shares.counted_targets import UNEQUAL_TARGETS
from trimtab.control.shares.loss_form import LossForm
from trimtab.errors import TrimtabError

_OTHER_NUMBERS = "what the loss is a mean over, or multiplied or divided by, differs from rank to rank"


_SAME = 1e-6
"""Buffers whose sums differ by a smaller part of their size are taken for equal."""


def agreed_problem(
    problem: str | None,
    targets: int | None,
    forms: Sequence[LossForm],
    state: Mapping[tuple[int, str], tuple[float, float]],
) -> str | None:
    """The problem of the first rank that has one, or a difference between ranks. Collective.

    Args:
        targets: those of a sample that count.
        forms: of the losses that were looked at. A mean over as many values as the longest sample of a batch has, or
            a loss divided by its own value, differs between ranks.
        state: for each buffer of the trained models its sum and that of its absolute values. Ranks begin with the same
            ones, so those that differ were made of a rank's own samples, as running means are.
    """
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (problem, targets, [form.numbers() for form in forms], dict(state)))
    problems, counted, numbers, states = zip(*ranks, strict=True)
    if any(each != counted[0] for each in counted):
        return UNEQUAL_TARGETS
    named = next((each for each in problems if each is not None), None)
    if named is None and any(each != numbers[0] for each in numbers):
        return _OTHER_NUMBERS
    return named or _of_own_samples(states)


def require_one_rate(rates: Sequence[float]) -> None:
    """Refuse what would let the ranks' parameters drift apart, which nothing else would show.

    Raises:
        TrimtabError: the ranks have different ones.
    """
    if len(set(rates)) > 1:
        raise TrimtabError(
            f"run: learning rates differ, from {min(rates):.4g} to {max(rates):.4g} on the ranks, now that batches are "
            "uneven: the script sets them by the samples of its own batches; count those of all ranks, or use "
            "--batch-sizes equal"
        )


def _of_own_samples(states: Sequence[Mapping[tuple[int, str], tuple[float, float]]]) -> str | None:
    """The first buffer that differs between ranks."""
    for key, (whole, size) in states[0].items():
        for other in states[1:]:
            if key in other and abs(other[key][0] - whole) > _SAME * max(size, other[key][1]):
                return f"the model keeps statistics of each rank's own samples in {key[1]}"
    return None
