"""Indicators of damage where model and batches are on different devices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.measure.damage.test_indicators import loss, make
from tests.support.requirements import requires

from trimtab.measure.damage.indicators import gradient_damage

pytestmark = requires(cuda=1)


def test_batches_on_another_device() -> None:
    model, batches = make()
    here = gradient_damage(model, batches, loss, precisions=["int8"])
    model.cuda()
    there = gradient_damage(
        model, batches, lambda y: F.cross_entropy(y, (torch.arange(len(y)) % 5).cuda()), precisions=["int8"]
    )
    for name, by in here.items():
        assert 0.2 < there[name]["int8"] / by["int8"] < 5
