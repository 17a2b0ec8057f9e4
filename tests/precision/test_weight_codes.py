"""Weight codes kept while gradients accumulate: used again only for a weight that has not changed."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.requirements import requires
from torch import nn
from torch.utils.checkpoint import checkpoint

import trimtab
from trimtab.precision import Precision, int8
from trimtab.precision.draw import Draw
from trimtab.precision.weight_codes import WeightCodes

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = requires(int8=True)


class Quantized:
    """Counts how often weights are quantized."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = int8.Int8.weight

        def weight(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(int8.Int8, "weight", weight)


def model_of(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int, steps: int) -> None:
    for step in range(steps):
        for part in range(micro_batches):
            torch.manual_seed(100 * step + part)
            model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def codes_of(model: nn.Module) -> WeightCodes:
    return model[0].__dict__["forward"].codes  # type: ignore[index,no-any-return]


def test_micro_batches_share_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known from the first step's second micro-batch on: later steps quantize each weight once."""
    model = model_of(32, 16)
    trimtab.set_precision(model, {"?*": "int8"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 4, 1)
    quantized = Quantized(monkeypatch)
    train(model, optimizer, 4, 3)
    assert quantized.count == 3
    assert codes_of(model).nbytes > 0


def test_without_accumulation_nothing_is_kept() -> None:
    model = model_of(32, 16)
    trimtab.set_precision(model, {"?*": "int8"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 1, 3)
    assert codes_of(model).nbytes == 0
    train(model, optimizer, 3, 2)
    assert codes_of(model).nbytes > 0
    train(model, optimizer, 1, 2)
    assert codes_of(model).nbytes == 0


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "foreach", "data"])
@pytest.mark.parametrize("to_none", [True, False])
def test_training_is_as_with_new_codes(
    optimizer: str, to_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rounding to nearest codes depend on the weight alone: kept or new, every number is the same."""

    class ByData(torch.optim.Optimizer):
        """Changes weights behind autograd's back, as old optimizers do."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.data.add_(p.grad, alpha=-0.1)

    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
        "data": ByData,
    }
    nearest = Precision(forward="int8", grad_input="int8", grad_weight="int8", rounding="nearest")
    results = []
    for kept in (True, False):
        model = model_of(32, 24, 16)
        trimtab.set_precision(model, {"?*": nearest})
        if not kept:
            monkeypatch.setattr(WeightCodes, "of", lambda *_: None)
        chosen = makers[optimizer](model.parameters())
        for step in range(4):
            for part in range(3):
                torch.manual_seed(100 * step + part)
                model(torch.randn(8, 32)).square().mean().backward()
            chosen.step()
            chosen.zero_grad(set_to_none=to_none)
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *results))


def replaced(model: Any) -> None:
    model[0].weight.data = model[0].weight.data + 1


def replaced_in_place(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.add_(1)


def loaded(model: Any) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def parameter_replaced(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() + 1)


def loop_over_data(model: Any) -> None:
    for p in model.parameters():
        p.data += 1
        p.grad = None


@pytest.mark.parametrize("change", [replaced, replaced_in_place, loaded, parameter_replaced, loop_over_data])
def test_a_changed_weight_is_quantized_again(change: Callable[[Any], None]) -> None:
    model = model_of(32, 16)
    nearest = Precision(forward="int8", grad_input="int8", grad_weight="int8", rounding="nearest")
    trimtab.set_precision(model, {"?*": nearest})
    x = torch.randn(8, 32)
    for _ in range(3):  # from the second on, the codes are kept
        model(x).square().mean().backward()
    assert codes_of(model).nbytes > 0
    change(model)
    y = model(x)
    fresh = model_of(32, 16)
    fresh.load_state_dict(model.state_dict())
    trimtab.set_precision(fresh, {"?*": nearest})
    assert torch.equal(y, fresh(x))


def test_memory_that_is_freed_is_not_taken_for_the_same() -> None:
    codes = WeightCodes()
    weight = nn.Parameter(torch.randn(4, 4))
    draws = [Draw(1, torch.tensor([i]), False) for i in range(4)]
    weight.grad = torch.zeros(4, 4)
    first = codes.of(weight, draws[0])
    assert codes.of(weight, draws[1]) is first
    for _ in range(4):  # the allocator hands out the same address again
        weight.data = torch.randn(4, 4)
    assert codes.of(weight, draws[2]) is not first


class Recomputed(nn.Module):
    """Two layers that are computed again in backward, or not."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.layers, self.recompute = model_of(32, 24, 16), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (
            checkpoint(self.layers, x, use_reentrant=False) if self.recompute else self.layers(x)
        )
        return result


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_recomputed_layers_draw_the_same_codes(micro_batches: int) -> None:
    """With stochastic rounding, in each of the micro-batches: else the recomputed forward would be another one."""
    models = [Recomputed(True), Recomputed(False)]
    for model in models:
        trimtab.set_precision(model, {"?*": "int8"})
    for _ in range(2):
        for part in range(micro_batches):
            torch.manual_seed(part)
            x = torch.randn(8, 32, requires_grad=True)
            for model in models:
                model(x).square().mean().backward()
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad)
            p.grad = q.grad = None


def test_copies_and_files_hold_no_codes() -> None:
    model = model_of(32, 16)
    trimtab.set_precision(model, {"?*": "int8"})
    for _ in range(3):
        model(torch.randn(8, 32)).sum().backward()
    assert codes_of(model).nbytes > 0
    assert codes_of(copy.deepcopy(model)).nbytes == 0
    assert codes_of(pickle.loads(pickle.dumps(model))).nbytes == 0
    assert set(model.state_dict()) == {"0.weight", "0.bias"}


def test_a_computed_weight_is_never_kept() -> None:
    model = model_of(32, 16)
    nn.utils.parametrizations.weight_norm(model[0])
    trimtab.set_precision(model, {"?*": "int8"})
    for _ in range(3):
        model(torch.randn(8, 32)).sum().backward()
    assert codes_of(model).nbytes == 0
