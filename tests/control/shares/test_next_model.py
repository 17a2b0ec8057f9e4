"""A script may train one model after another."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from trimtab.control.shares.takeover import Takeover


def test_a_model_in_the_place_of_one_that_is_gone_is_known() -> None:
    models, model = Takeover()._models, nn.Linear(2, 2)
    models._latest = weakref.ref(nn.Linear(2, 2))  # gone at once
    models._inside = {id(model)}
    models.before_forward(model, (torch.ones(3, 2),), {})
    assert models.latest is model
    assert models.rows == 3
