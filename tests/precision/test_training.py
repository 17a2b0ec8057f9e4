"""Training in each precision beside fp32, with a canary: a comparison that cannot see damage proves nothing."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch

from trimtab.api.set_precision import set_precision
from trimtab.models.data import tokens
from trimtab.models.gpt import Gpt
from trimtab.precision.devices import offers
from trimtab.precision_names import Precision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.precision_names import PrecisionName

STEPS, LAST = 90, 30
SEEDS = (0, 1)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# On a CPU fp16 takes a hundred times as long.
TRIED = ("tf32", "bf16", "fp16", "fp8", "int8") if DEVICE.type == "cuda" else ("bf16", "int8")
NAMES: list[PrecisionName] = [name for name in TRIED if name in offers(DEVICE)["linear"]]


@cache
def final_loss(name: str, seed: int) -> float:
    """The mean of the last losses of a small GPT trained on Python source."""
    torch.manual_seed(seed)
    model = Gpt(width=64, layers=2, heads=2, context=48).to(DEVICE)
    if name == "canary":
        # Known to be harmful: truncation, which shrinks what it should round, to three bits.
        for block in model.blocks:
            block.register_full_backward_hook(lambda _, grads, __: (_truncated(grads[0]),))  # type: ignore[index]
    elif name != "fp32":
        set_precision(model, {"blocks.*": Precision.of(name)}, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        loss = model(tokens(8, 48, step=step, seed=seed).to(DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[0] > 5
    return sum(losses[-LAST:]) / LAST


def _truncated(g: torch.Tensor) -> torch.Tensor:
    step = g.abs().max() / 3
    return (g / step).trunc() * step


def damage(name: str) -> float:
    """How much higher the loss is than fp32's, in nats: the mean over seeds."""
    differences = [final_loss(name, seed) - final_loss("fp32", seed) for seed in SEEDS]
    return sum(differences) / len(differences)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


HARMLESS = 0.05
"""In nats; fp32 falls by about 3 in these steps."""


@pytest.mark.parametrize("name", NAMES)
def test_lower_precision_trains_as_fp32_does(name: str) -> None:
    assert final_loss("fp32", 0) < 3.5
    assert damage(name) < HARMLESS


def test_the_canary_is_flagged() -> None:
    assert damage("canary") > HARMLESS
