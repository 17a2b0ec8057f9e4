"""A fingerprint tells models apart by their structure, not their values."""

from __future__ import annotations

import torch
from tests.measure.capture.models import MODELS
from torch import nn

import trimtab
from trimtab.measure.fingerprint import fingerprint


def test_a_fingerprint_is_of_structure_alone() -> None:
    one = MODELS["gpt"]()
    with torch.device("meta"):
        empty = MODELS["gpt"]()
    assert fingerprint(one) == fingerprint(empty)
    low = trimtab.set_precision(MODELS["gpt"](), {"blocks.*": "bf16"})
    assert fingerprint(low) == fingerprint(one)
    for parameter in one.parameters():
        parameter.requires_grad_(False)
    assert fingerprint(one) == fingerprint(empty)


def test_another_model_has_another_fingerprint() -> None:
    made = {
        fingerprint(m)
        for m in (
            nn.Sequential(nn.Linear(2, 3)),
            nn.Sequential(nn.Linear(3, 2)),
            nn.Sequential(nn.Linear(2, 3, bias=False)),
            nn.Sequential(nn.Linear(2, 3)).bfloat16(),
            nn.Sequential(nn.Identity(), nn.Linear(2, 3)),
        )
    }
    assert len(made) == 5
