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

    from tests.support.pool import Pool

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


class ByData(torch.optim.Optimizer):
    """Changes weights behind autograd's back, as old optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-0.1)


class ByHand:
    """No torch optimizer, and no trace of its changes: neither of the weights nor of the gradients."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    def step(self) -> None:
        for p in self.parameters:
            p.data.sub_(p.grad.data, alpha=0.1)

    def zero_grad(self, set_to_none: bool) -> None:
        for p in self.parameters:
            if set_to_none:
                p.grad = None
            else:
                p.grad.data.zero_()


class ByHandForeach(ByHand):
    def step(self) -> None:
        torch._foreach_sub_(
            [p.data for p in self.parameters], [p.grad.data for p in self.parameters], alpha=0.1
        )


class ByHandFused(ByHand):
    """The kernel of a fused optimizer, called on its own."""

    def step(self) -> None:
        weights, gradients = (
            [t.data for t in which] for which in (self.parameters, [p.grad for p in self.parameters])
        )
        torch._fused_sgd_(
            weights, gradients, [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "data": ByData,
    "by hand": ByHand,
    "by hand, foreach": ByHandForeach,
    "by hand, fused": ByHandFused,
}
NEAREST = Precision(forward="int8", grad_input="int8", grad_weight="int8", rounding="nearest")


def trained(
    make: Callable[[Any], Any], to_none: bool, between: Callable[[nn.Module, int, int], None] | None = None
) -> list[torch.Tensor]:
    """The weights after four steps of three micro-batches; `between` comes before each of them."""
    model = model_of(32, 24, 16)
    trimtab.set_precision(model, {"?*": NEAREST})
    optimizer = make(model.parameters())
    for step in range(4):
        for part in range(3):
            if between is not None:
                between(model, step, part)
            torch.manual_seed(100 * step + part)
            model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("to_none", [True, False])
def test_training_is_as_with_new_codes(
    optimizer: str, to_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rounding to nearest codes depend on the weight alone: kept or new, every number is the same."""
    kept = trained(OPTIMIZERS[optimizer], to_none)
    monkeypatch.setattr(WeightCodes, "of", lambda *_: None)
    assert all(map(torch.equal, kept, trained(OPTIMIZERS[optimizer], to_none)))


def evaluated_with_other_weights(model: nn.Module, step: int, part: int) -> None:
    """As an average of weights is: swapped in and out through `.data`."""
    if (step, part) not in ((2, 0), (3, 1)):
        return
    own = [p.data.clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.mul_(0.5)
    with torch.no_grad():
        model(torch.ones(8, 32))
    for p, weight in zip(model.parameters(), own, strict=True):
        p.data.copy_(weight)


@pytest.mark.parametrize("to_none", [True, False])
def test_weights_that_are_swapped_for_evaluation(to_none: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    between = evaluated_with_other_weights
    kept = trained(OPTIMIZERS["sgd"], to_none, between)
    monkeypatch.setattr(WeightCodes, "of", lambda *_: None)
    assert all(map(torch.equal, kept, trained(OPTIMIZERS["sgd"], to_none, between)))


def test_codes_serve_no_longer_than_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that goes on without its optimizer quantizes each time, once it has missed the step."""
    model = model_of(32, 16)
    trimtab.set_precision(model, {"?*": NEAREST})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 2, 3)
    quantized = Quantized(monkeypatch)
    for _ in range(6):
        model(torch.randn(8, 32)).sum().backward()
    # The second shares the codes of the first; those after it do not.
    assert quantized.count == 5
    assert codes_of(model).nbytes == 0


def replaced(model: Any) -> None:
    model[0].weight.data = model[0].weight.data + 1


def replaced_in_place(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.add_(1)


def copied_in_place(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight + 1)


def changed_by_foreach(model: Any) -> None:
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), 1.0)


def loaded(model: Any) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def assigned(model: Any) -> None:
    state = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def parameter_replaced(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() + 1)


def loop_over_data(model: Any) -> None:
    for p in model.parameters():
        p.data += 1
        p.grad = None


@pytest.mark.parametrize(
    "change",
    [
        replaced, replaced_in_place, copied_in_place, changed_by_foreach, loaded, assigned, parameter_replaced,
        loop_over_data,
    ],
)  # fmt: skip
def test_a_changed_weight_is_quantized_again(change: Callable[[Any], None]) -> None:
    model = model_of(32, 16)
    trimtab.set_precision(model, {"?*": NEAREST})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 4, 2)
    x = torch.randn(8, 32)
    for _ in range(3):
        model(x).square().mean().backward()
    assert codes_of(model).nbytes > 0
    change(model)
    y = model(x)
    fresh = model_of(32, 16)
    fresh.load_state_dict(model.state_dict())
    trimtab.set_precision(fresh, {"?*": NEAREST})
    assert torch.equal(y, fresh(x))


def test_without_an_optimizer_nothing_is_kept() -> None:
    """A loop of one's own may change weights in ways that leave no trace."""
    model = model_of(32, 16)
    trimtab.set_precision(model, {"?*": "int8"})
    others = torch.optim.SGD(model_of(4, 4).parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(3):
            model(torch.randn(8, 32)).sum().backward()
            assert codes_of(model).nbytes == 0
        others.step()


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


def _sharded(way: str, sync: bool, kept: bool) -> list[list[float]]:
    """Weights after three steps of three micro-batches under FSDP2, changed by an optimizer or by hand."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with pytest.MonkeyPatch.context() as patch:
        if not kept:
            patch.setattr(WeightCodes, "of", lambda *_: None)
        model: Any = model_of(32, 24, 16)
        trimtab.set_precision(model, {"?*": NEAREST})
        mesh = init_device_mesh("cpu", (2,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = OPTIMIZERS[way](model.parameters())
        for step in range(3):
            for part in range(3):
                model.set_requires_gradient_sync(sync or part == 2)
                torch.manual_seed(100 * step + part)
                model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return [p.full_tensor().flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize("way", ["sgd", "by hand"])
@pytest.mark.parametrize("sync", [True, False])
def test_under_fsdp2_training_is_as_with_new_codes(ranks: Pool, way: str, sync: bool) -> None:
    """Its weights are gathered into the same memory each time, in ways that no version counts."""
    kept, new = ranks(2, _sharded, way, sync, True), ranks(2, _sharded, way, sync, False)
    assert kept == new


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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 3, 2)
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
