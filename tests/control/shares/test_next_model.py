"""A script may train one model after another."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from trimtab.control.shares.takeover import Takeover


def test_a_model_in_the_place_of_one_that_is_gone_is_known() -> None:
    takeover, model = Takeover(), nn.Linear(2, 2)
    takeover._model = weakref.ref(nn.Linear(2, 2))  # gone at once
    takeover._inside = {id(model)}
    takeover._before_forward(model, (torch.ones(3, 2),), {})
    assert takeover._model() is model
    assert takeover._rows == 3
