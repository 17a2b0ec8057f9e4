"""Clipping sees the gradient that a single device would see."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import pytest
import torch
from tests.sharding.jobs import convert, difference
from tests.sharding.models import loss_of, make

from trimtab.sharding import clip_grad_norm_

if TYPE_CHECKING:
    from tests.support.pool import Pool


def clip(kind: str, norm_type: float, max_norm: float) -> tuple[float, float, float]:
    alone = make(kind)
    spread = convert(copy.deepcopy(alone), shares=[1, 2, 3], headroom=0.4)
    for model in (alone, spread):
        loss_of(kind, model, 0).backward()
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), max_norm, norm_type)
    actual = clip_grad_norm_(spread, max_norm, norm_type)
    return float(expected), float(actual), difference(alone, spread, lambda p: p.grad)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_equals_a_single_device(ranks: Pool, norm_type: float, max_norm: float) -> None:
    for expected, actual, worst in ranks(3, clip, "gpt2", norm_type, max_norm):
        assert actual == pytest.approx(expected, rel=1e-12)
        assert worst < 1e-12


def not_finite() -> tuple[bool, str]:
    model = convert(make("gpt"))
    loss_of("gpt", model, 0).backward()
    gradient = model.get_parameter("blocks.0.up.weight").grad
    assert gradient is not None
    if torch.distributed.get_rank() == 1:
        gradient[0, 0] = math.nan
    try:
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return bool(clip_grad_norm_(model, 1.0).isnan()), str(error)
    return False, "no error"


def test_one_ranks_nan_is_seen_by_all(ranks: Pool) -> None:
    for is_nan, message in ranks(2, not_finite):
        assert is_nan
        assert "cannot be clipped" in message
