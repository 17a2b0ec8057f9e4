"""What models do inside a forward in which operators hand on bf16, and with what leaves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Distribution, Independent, Normal
from torch.utils.checkpoint import checkpoint

from trimtab.api.set_precision import set_precision
from trimtab.precision.devices import offers
from trimtab.precision.lift import lifted

if TYPE_CHECKING:
    from collections.abc import Callable

LOW = "int8" if "int8" in offers(torch.device("cpu"))["linear"] else "bf16"
HALF, FULL = torch.bfloat16, torch.float32


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def inputs() -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


class Stages(nn.Module):
    """Stages that may be recomputed in backward, one of them without any parameter."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.first, self.plain = nn.Linear(16, 16), nn.Linear(16, 16)
        self.block, self.mix = nn.Sequential(nn.Linear(16, 16), nn.GELU()), Mix()

    def run(self, stage: nn.Module, *values: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return stage(*values)  # type: ignore[no-any-return]
        return checkpoint(stage, *values, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.run(self.first, x.requires_grad_())
        z = self.run(self.block, y)
        y = self.run(self.mix, self.run(self.plain, y), z)
        return self.run(self.mix, self.first(y), x)


class Mix(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ y.t()).softmax(-1) @ y


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("patterns", [{"first": "bf16"}, {"first": LOW, "block.0": LOW}, {"?*": LOW}])
def test_stages_without_lowered_operators_are_recomputed_too(
    patterns: dict[str, str], reentrant: bool
) -> None:
    """On a CPU torch restores no fp32 autocast, without which a product of bf16 and fp32 is an error."""
    gradients = []
    for way in (None, reentrant):
        model = set_precision(Stages(way), patterns)
        model(inputs()).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
        assert not torch.is_autocast_enabled("cpu")
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_whole_model_is_recomputed_with_the_same_bits(reentrant: bool) -> None:
    gradients = []
    for recomputed in (False, True):
        model, x = set_precision(layers(), {"?*": LOW}), inputs().requires_grad_()
        for _ in range(2):
            y = checkpoint(model, x, use_reentrant=reentrant) if recomputed else model(x)
            y.square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class Tree(nn.Module):
    """A model that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.node = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        y: torch.Tensor = self.leaf(x if depth == 0 else self(x, depth - 1))
        return self.node(y)  # type: ignore[no-any-return]


def test_a_model_that_calls_itself_stays_inside_its_forward() -> None:
    model = set_precision(Tree(), {"leaf": LOW})
    y = model(inputs())
    y.sum().backward()
    assert y.dtype == FULL
    assert not torch.is_autocast_enabled("cpu")


class Keywords(nn.Module):
    """Recurrent layers that are given what was lowered by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gru, self.cell = nn.Linear(16, 16), nn.GRU(16, 16), nn.RNNCell(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        z, _ = self.gru(input=x[:, None], hx=y[None, :1])
        return self.cell(z[:, 0], hx=y)  # type: ignore[no-any-return]


class ManyClasses(nn.Module):
    """A loss that writes rows of fp32 into a tensor of its input's type."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10])
        self.recomputed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, targets = self.first(x), torch.arange(0, 16, 2)
        if self.recomputed:
            return checkpoint(self.loss, y, targets, use_reentrant=False).loss  # type: ignore[no-any-return]
        return self.loss(y, targets).loss  # type: ignore[no-any-return]


class Pairs(nn.Module):
    """A bilinear form of what a lowered layer hands on and of the model's input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.form = nn.Linear(16, 16), nn.Bilinear(16, 16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.form(self.first(x), x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("pattern", ["first", "?*"])
@pytest.mark.parametrize("make", [Keywords, ManyClasses, Pairs])
def test_what_needs_fp32_gets_it(make: Callable[[], Any], pattern: str) -> None:
    torch.manual_seed(0)
    model = make()
    for recomputed in (False, True):
        model.recomputed = recomputed
        exact = torch.autograd.grad(model(inputs()).sum(), model.first.weight)[0]
        set_precision(model, {pattern: "bf16"})
        y = model(inputs())
        (gradient,) = torch.autograd.grad(y.sum(), model.first.weight)
        set_precision(model, {})
        assert y.dtype == FULL
        assert float((gradient - exact).norm() / exact.norm()) < 0.05


def test_hooks_of_the_model_see_what_its_caller_sees() -> None:
    model, seen = layers(), []
    model.register_forward_hook(lambda *given: seen.append(given[2].dtype))
    set_precision(model, {"?*": LOW})
    model.register_forward_hook(lambda *given: seen.append(given[2].dtype))
    model(inputs())
    assert seen == [FULL, FULL]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, HALF])
def test_a_model_that_is_converted_afterwards_keeps_its_type(dtype: torch.dtype) -> None:
    model = set_precision(layers(), {"?*": "bf16"}).to(dtype)
    y = model(inputs().to(dtype))
    y.sum().backward()
    assert y.dtype == dtype
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}
    model.float()
    assert model(inputs()).dtype == FULL


@dataclass(frozen=True)
class Result:
    logits: torch.Tensor
    steps: int
    more: dict[str, Any]


class Named(dict):  # type: ignore[type-arg]
    """A mapping that torch does not know as a container."""


def test_outputs_of_any_kind_are_lifted() -> None:
    low, full = torch.ones(2, dtype=HALF), torch.ones(2)
    result = lifted(Result(low, 3, {"x": [low, full]}))
    assert isinstance(result, Result)
    assert result.logits.dtype == result.more["x"][0].dtype == FULL
    assert result.more["x"][1] is full
    assert result.steps == 3
    assert lifted(Named(y=low))["y"].dtype == FULL
    policy = lifted(Independent(Normal(low, low), 1))
    assert isinstance(policy, Distribution)
    assert policy.log_prob(full).dtype == policy.mean.dtype == FULL


def test_what_needs_no_lifting_stays_the_same_object() -> None:
    endless = Named(y=torch.ones(2))
    endless["self"] = endless
    for value in (
        Result(torch.ones(2), 3, {}),
        Named(y=1),
        Normal(torch.zeros(2), torch.ones(2)),
        endless,
        Result,
    ):
        assert lifted(value) is value


class Acts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> Result:
        return Result(F.relu(self.layer(x)), 1, {})


def test_a_model_may_return_a_dataclass() -> None:
    model = set_precision(Acts(), {"layer": LOW})
    result = model(inputs())
    result.logits.sum().backward()
    assert result.logits.dtype == FULL
