"""How the ranks of a hybrid cluster train: a fast rank in fp32, a slow one by each method.

Both ranks' parts of a step are computed in one process, one after the other: the slow rank's through a copy of the
model that has the same parameters. Their losses are weighted by their samples, so that the gradient is that of
data-parallel training; a rank's speed does not change what it computes. As under DDP each rank normalizes its own
samples, and the buffers of the first rank (running averages) are those that are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader

from trimtab.api.set_precision import set_precision
from trimtab.bench.harness import AA
from trimtab.bench.losses import DIVERGED
from trimtab.bench.scenarios.hybrid_accuracy.settings import Setting
from trimtab.models.tasks import Task
from trimtab.precision.operators import operators
from trimtab.precision_names import Precision

FP32, UNIFORM, TENSOR, CANARY, PLAN, PLAN_INT8, DBS = (
    "fp32",
    "uniform-low",
    "uniform-low-tensor",
    "int4",
    "plan",
    "plan-int8",
    "dbs",
)
AGAIN = (FP32 + AA, FP32 + AA + " 2", FP32 + AA + " 3")
"""The A/A rows: fp32 with changes of the size that bf16 makes, but at random in every step (`rounded_at_random`)."""

METHODS = (FP32, *AGAIN, UNIFORM, TENSOR, CANARY, PLAN, PLAN_INT8, DBS)

PER_TENSOR = Precision(
    forward="int8", grad_input="int8", grad_weight="int8", scales="tensor", rounding="nearest"
)
"""Cruder than Trimtab's own int8: one scale for a whole tensor, rounded to nearest."""

ROUNDING = 1 / 512
"""Largest relative change of a result of an A/A row: as much as bf16 rounds it."""

_LEVELS = 7
"""Of four bits, up and down."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the slow rank takes part."""

    precisions: Mapping[str, str]
    """Of its operators, by name."""

    part: float = 0.5
    """Its part of the samples."""

    kind: str = UNIFORM
    """`TENSOR` or `CANARY` for a cruder form of what is lowered, one of `AGAIN` for fp32 with random changes."""

    @property
    def simulated(self) -> bool:
        """Whether its step time means nothing."""
        return self.kind in (CANARY, *AGAIN)

    def lowered(self, model: nn.Module, seed: int) -> nn.Module:
        """Lower a model in place; `seed` is that of random rounding."""
        if self.kind in AGAIN:
            return rounded_at_random(model, seed * len(AGAIN) + AGAIN.index(self.kind))
        if self.kind == CANARY:
            return in_four_bits(model, list(self.precisions))
        crude = self.kind == TENSOR
        chosen = {name: PER_TENSOR if crude else p for name, p in self.precisions.items()}
        return set_precision(model, chosen, seed=seed)

    def samples(self, total: int) -> tuple[int, int]:
        """Of the fast and the slow rank."""
        slow = round(total * self.part)
        return total - slow, slow


def lowerable(model: nn.Module) -> list[str]:
    """The operators that int8 is for: linear layers and convolutions."""
    return [name for name, kind in operators(model).items() if kind in ("linear", "conv")]


def ways(model: nn.Module, plans: Mapping[str, Mapping[str, str]], speed: float) -> dict[str, Way]:
    """Every method, given the plans' precisions of the slow rank and its speed relative to the fast one's."""
    low = dict.fromkeys(lowerable(model), "int8")
    plain = Way(precisions={})
    return {
        FP32: plain,
        **{name: Way(precisions={}, kind=name) for name in AGAIN},
        UNIFORM: Way(precisions=low),
        TENSOR: Way(precisions=low, kind=TENSOR),
        CANARY: Way(precisions=low, kind=CANARY),
        **{name: Way(precisions=precisions) for name, precisions in plans.items()},
        DBS: Way(precisions={}, part=speed / (1 + speed)),
    }


def twin(model: nn.Module) -> nn.Module:
    """A copy of a model with the same parameters, not copies of them, and with buffers of its own."""
    return deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


class Pair:
    """Both ranks of a hybrid cluster."""

    def __init__(self, task: Task, way: Way, seed: int) -> None:
        self.fast, self.task, self.way = task.model, task, way
        self.slow = way.lowered(twin(task.model), seed)

    def backward(self, batch: tuple[Tensor, ...]) -> None:
        """Add the gradient of the mean loss over a global batch, the first part of it computed by the fast rank."""
        total = len(batch[0])
        fast, _ = self.way.samples(total)
        for rank, samples in ((self.fast, slice(fast)), (self.slow, slice(fast, None))):
            own = [part[samples] for part in batch]
            (rank(*own) * (len(own[0]) / total)).backward()

    def batch(self, step: int, data_seed: int) -> tuple[Tensor, ...]:
        """The global batch of a step: both ranks' samples when they have the same number."""
        return self.task.batch(2 * self.task.samples, step=step, seed=data_seed)


def train(setting: Setting, way: Way, seed: int, steps: int) -> dict[str, float]:
    """Train with a one-cycle learning rate; returns accuracy and loss on what was not trained on, in fp32.

    `untrained` is the loss before training.
    """
    task = setting.make(seed)
    untrained = judge(task)["loss"]
    pair = Pair(task, way, seed)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=setting.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, setting.lr, total_steps=steps, cycle_momentum=False
    )
    for step in range(steps):
        pair.backward(pair.batch(step, seed))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return {**judge(task), "untrained": untrained}


def judge(task: Task) -> dict[str, float]:
    """Accuracy and mean loss of the trained model on what it was not trained on."""
    net: Any = task.model.net
    task.model.eval()
    right, count, loss = 0, 0, 0.0
    with torch.no_grad():
        for inputs, labels in DataLoader(task.held_out, 100):
            logits = net(inputs).flatten(0, -2)
            right += int((logits.argmax(-1) == labels.flatten()).sum())
            loss += float(nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum"))
            count += labels.numel()
    task.model.train()
    return {"accuracy": right / count, "loss": loss / count if isfinite(loss) else DIVERGED}


class _Jitter(torch.autograd.Function):
    """Values, and on the way back their gradient, changed at random."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, generator: torch.Generator) -> Tensor:
        ctx.generator = generator
        return _jittered(values, generator)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _jittered(gradient, ctx.generator), None


def _jittered(values: Tensor, generator: torch.Generator) -> Tensor:
    return values * torch.empty_like(values).uniform_(1 - ROUNDING, 1 + ROUNDING, generator=generator)


def rounded_at_random(model: nn.Module, seed: int) -> nn.Module:
    """Change the results of operators, and gradients for them, by as much as bf16 would, in place.

    Up as often as down and anew in every step, so that it harms nothing: what it does to the result of training is
    chance.
    """
    generator = torch.Generator().manual_seed(seed)
    for name in lowerable(model):
        model.get_submodule(name).register_forward_hook(
            lambda *call: _Jitter.apply(call[2], generator)  # type: ignore[no-untyped-call]
        )
    return model


def four_bits(values: Tensor) -> Tensor:
    """Values in four bits: one scale for all of them, rounded to nearest."""
    scale = values.abs().amax() / _LEVELS + torch.finfo(values.dtype).tiny
    return (values / scale).round() * scale


class _FourBits(nn.Module):
    """Four bits on the way forward; the gradient passes as if there were no rounding."""

    def forward(self, values: Tensor) -> Tensor:
        return values + (four_bits(values.detach()) - values.detach())


class _FourBitGradient(torch.autograd.Function):
    """Nothing on the way forward; the gradient in four bits."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return four_bits(gradient)


def in_four_bits(model: nn.Module, names: list[str]) -> nn.Module:
    """Compute operators with weights, inputs and gradients in four bits, in place: known to be harmful.

    As `PER_TENSOR`, with half the bits. It is simulated in fp32, so that only its accuracy means something.
    """
    four = _FourBits()
    for name in names:
        module = model.get_submodule(name)
        parametrize.register_parametrization(module, "weight", _FourBits(), unsafe=True)
        module.register_forward_pre_hook(
            lambda _, arguments: (four(arguments[0]), *islice(arguments, 1, None))
        )
        module.register_forward_hook(lambda *call: _FourBitGradient.apply(call[2]))  # type: ignore[no-untyped-call]
    return model
