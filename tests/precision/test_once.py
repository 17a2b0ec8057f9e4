"""Second derivatives and torch.func's transforms: refused, never computed without what is lowered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from trimtab.api.set_precision import set_precision
from trimtab.errors import TrimtabError
from trimtab.precision.devices import offers

LOW = list(dict.fromkeys(("bf16", "int8" if "int8" in offers(torch.device("cpu"))["linear"] else "bf16")))
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 4), (3, 8)),
    "conv": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 6, 6)),
}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("case", CASES)
def test_a_penalty_on_the_gradient_is_refused(case: str, low: str) -> None:
    """Also where nothing that the gradient depends on but the weight needs a gradient itself."""
    make, shape = CASES[case]
    model = set_precision(nn.Sequential(make()), {"0": low})
    x = torch.randn(shape, requires_grad=True)
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(
        RuntimeError, match="set_precision: operators in low precision cannot be differentiated"
    ):
        (y.sum() + gradient.square().sum()).backward()


@pytest.mark.parametrize("case", CASES)
def test_a_graph_of_gradients_that_nobody_differentiates_is_fine(case: str) -> None:
    make, shape = CASES[case]
    model = set_precision(nn.Sequential(make()), {"0": "bf16"})
    x = torch.randn(shape)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x).square().sum(), parameters)
    gradients = torch.autograd.grad(model(x).square().sum(), parameters, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_transforms_of_torch_func_are_refused(case: str) -> None:
    make, shape = CASES[case]
    model = set_precision(nn.Sequential(make()), {"0": "bf16"})
    with pytest.raises(TrimtabError, match=r"do not run inside torch\.func's transforms"):
        torch.func.vmap(model)(torch.randn(2, *shape))
    with pytest.raises(TrimtabError, match=r"do not run inside torch\.func's transforms"):
        torch.func.grad(lambda x: model(x).sum())(torch.randn(shape))
