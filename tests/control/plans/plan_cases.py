"""A small model, and plans for it, for the tests of what plans do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import trimtab
from trimtab.measure.fingerprint import fingerprint
from trimtab.planning.plan import PLAN_VERSION, Choice, Plan, Predicted, Role

WIDTH = 64
LINEARS = ("up", "middle", "down")


class Net(nn.Module):
    """Three layers that can be lowered."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.middle = nn.Linear(2 * width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.gelu(self.middle(F.gelu(self.up(x)))))
        return y


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def corpus(samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1)))


def role(device: str, samples: int, **precisions: str) -> Role:
    choices = {
        name: {
            "own": Choice(seconds=2e-3, damage=0.0),
            "bf16": Choice(seconds=1.5e-3, damage=1.0),
            "fp16": Choice(seconds=1e-3, damage=4.0),
        }
        for name in LINEARS
    }
    return Role(
        device=device,
        kind="cpu",
        samples=samples,
        precisions=precisions,
        compute_s=7e-3,
        peak_bytes=1 << 20,
        choices=choices,
    )


def plan_for(model: nn.Module, **changes: Any) -> Plan:
    """A fast and a slow rank; the slow one has a layer in fp16 and one in bf16."""
    plan = Plan(
        version=PLAN_VERSION,
        trimtab=trimtab.__version__,
        model=fingerprint(model),
        batch="free",
        bits=None,
        roles={"fast": role("A", 5), "slow": role("B", 3, up="fp16", down="bf16")},
        ranks=(("fast", 1), ("slow", 1)),
        predicted=Predicted(step_s=8e-3, plain_step_s=1e-2, damage=5.0, uniform_damage=12.0),
        reasons=("made by hand",),
    )
    return replace(plan, **changes)
