"""Convolutions, 1-D and 2-D, in every precision of this device beside fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trimtab.api.set_precision import set_precision
from trimtab.precision.conv import Geometry, conv
from trimtab.precision.devices import offers
from trimtab.precision.draw import Draw
from trimtab.precision_names import Precision

ALL = [name for name in ("fp32", "bf16", "fp16", "int8") if name in offers(torch.device("cpu"))["conv"]]
LARGEST = {"fp32": 1e-6, "bf16": 8e-3, "fp16": 2e-3, "int8": 3e-2}
"""Error in the Frobenius norm: for int8 √(1/6) of a step each of two operands, 1/127 of 3 to 4 deviations."""

CASES: list[tuple[Any, tuple[int, ...]]] = [
    (lambda: nn.Conv2d(6, 8, 3, padding=1), (2, 6, 9, 7)),
    (lambda: nn.Conv2d(6, 8, (3, 2), stride=2, padding=(1, 0), dilation=(1, 2)), (2, 6, 9, 7)),
    (lambda: nn.Conv2d(8, 12, 3, groups=4, bias=False), (2, 8, 9, 7)),
    (lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), (2, 4, 8, 8)),
    (lambda: nn.Conv2d(8, 16, 1), (2, 8, 5, 5)),
    (lambda: nn.Conv2d(4, 4, 4, padding="same"), (2, 4, 8, 8)),
    (lambda: nn.Conv2d(4, 4, (5, 2), padding="same", dilation=(2, 1)), (2, 4, 9, 8)),
    (lambda: nn.Conv1d(4, 4, 3, padding="same"), (2, 4, 8)),
    (lambda: nn.Conv2d(4, 4, 3, padding="valid"), (4, 8, 8)),
    (lambda: nn.Conv2d(4, 4, (4, 3), padding="same", padding_mode="circular"), (2, 4, 8, 8)),
    (lambda: nn.Conv2d(4, 6, 3, padding=(2, 1), stride=2, padding_mode="reflect"), (4, 8, 8)),
    (lambda: nn.Conv1d(4, 6, 4, stride=3, padding=2), (3, 4, 17)),
    (lambda: nn.Conv1d(4, 6, 3, padding=2, padding_mode="replicate"), (4, 17)),
    (lambda: nn.Conv1d(4, 6, 3), (1, 4, 17)),  # its windows overlap in memory
    (lambda: nn.Conv1d(4, 6, 4, stride=2, padding=1), (4, 17)),
    (lambda: nn.Conv2d(4, 6, 3), (1, 4, 3, 9)),
    (lambda: nn.Conv2d(4, 6, (3, 1), padding=(1, 0)), (1, 4, 9, 1)),
    (lambda: nn.Conv1d(4, 4, 3, groups=4, padding=2, dilation=2), (3, 4, 17)),
]


def results(model: nn.Module, x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], g.to(y.dtype))]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("name", ALL)
def test_forward_and_gradients_are_close_to_fp64(name: str, case: int) -> None:
    torch.manual_seed(case)
    make, shape = CASES[case]
    model = nn.Sequential(make()).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    g = torch.randn_like(model(x))
    exact = results(model, x, g)
    model.float()
    set_precision(model, {"0": name})
    outputs = results(model, x.detach().float().requires_grad_(), g)
    for actual, true in zip(outputs, exact, strict=True):
        assert actual.shape == true.shape
        assert actual.dtype == torch.float32
        assert float((actual - true).norm() / true.norm()) < LARGEST[name]


@pytest.mark.skipif("int8" not in ALL, reason="this CPU has no int8")
def test_int8_is_unbiased_and_mixes_with_others() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1))
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    g = torch.randn(2, 6, 6, 6)
    exact = results(model, x, g)
    for precision in (
        Precision.of("int8"),
        Precision(forward="int8", grad_input="bf16", grad_weight="int8"),
        Precision(forward="fp32", grad_input="int8", grad_weight="fp32"),
    ):
        sums = [torch.zeros_like(t) for t in exact]
        for seed in range(64):
            set_precision(model, {"0": precision}, seed=seed)
            for total, part in zip(sums, results(model, x, g), strict=True):
                total += part / 64
        for total, true in zip(sums, exact, strict=True):
            assert float((total - true).norm() / true.norm()) < 0.02 / 64**0.5 * 3 + 3e-3


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("groups", [1, 2])
def test_an_empty_batch_has_zero_gradients(name: str, groups: int) -> None:
    x = torch.randn(0, 6, 9, 7, requires_grad=True)
    weight, bias = torch.randn(8, 6 // groups, 3, 3, requires_grad=True), torch.randn(8, requires_grad=True)
    geometry = Geometry((2, 2), (1, 1), (1, 1), groups, x.shape, weight.shape)
    draw = Draw(0, torch.zeros(1, dtype=torch.int64), True)
    y = conv(x, weight, bias, geometry, Precision.of(name), draw)
    assert y.shape == (0, 8, 5, 4)
    y.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    assert x.grad.shape == x.shape
    assert not weight.grad.any()
    assert not bias.grad.any()


@pytest.mark.skipif("int8" not in ALL, reason="this CPU has no int8")
def test_what_is_saved_is_the_codes() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1))
    set_precision(model, {"0": "int8"})
    x = torch.randn(4, 16, 20, 20, requires_grad=True)
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    weights = {p.data_ptr() for p in model.parameters()}
    assert sum(t.nbytes for t in kept if t.data_ptr() not in weights) <= x.nbytes / 4 + 64


@pytest.mark.parametrize("name", [name for name in ALL if name in ("bf16", "fp16")])
def test_places_of_the_kernel_that_see_nothing_but_padding_have_no_gradient(name: str) -> None:
    """torch's own half-precision convolution leaves whatever was in memory there."""
    torch.manual_seed(0)
    layer = nn.Conv2d(64, 64, 3, stride=2, padding=1, bias=False)
    model = set_precision(nn.Sequential(layer), {"0": name})
    for _ in range(10):
        for size in (64 * 64 * 9, 64 * 64 * 5, 64 * 64 * 9 // 2):
            torch.full((size,), float("nan"))  # freed at once, for others to find
        (gradient,) = torch.autograd.grad(model(torch.randn(32, 64, 1, 1)).sum(), [layer.weight])
        assert float(gradient[:, :, 1, 1].abs().min()) > 0
        assert int((gradient != 0).sum()) == 64 * 64


def test_which_places_those_are() -> None:
    from trimtab.precision.conv import Geometry, has_position_on_padding_only

    def affected(size: int, stride: int, padding: int, dilation: int, kernel: int = 3) -> bool:
        shapes = torch.Size((1, 1, size, size)), torch.Size((1, 1, kernel, kernel))
        geometry = Geometry((stride, stride), (padding, padding), (dilation, dilation), 1, *shapes)
        return has_position_on_padding_only(geometry)

    assert affected(1, 1, 1, 1)
    assert affected(2, 4, 1, 1)  # one put: its first place is outside
    assert not affected(2, 1, 1, 1)
    assert affected(2, 1, 2, 2)
    assert not affected(9, 2, 1, 1)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("one_dimensional", [True, False])
def test_a_result_may_be_changed_in_place(name: str, batched: bool, one_dimensional: bool) -> None:
    torch.manual_seed(0)
    layer = (nn.Conv1d if one_dimensional else nn.Conv2d)(3, 4, 3)
    x = torch.randn(2, 3, 8) if one_dimensional else torch.randn(2, 3, 8, 8)
    x = x if batched else x[0]
    names: Any = {"forward": name, "grad_input": name, "grad_weight": name}
    set_precision(layer, {"": Precision(**names, rounding="nearest")})
    gradients = []
    for in_place in (False, True):
        y: torch.Tensor = layer(x)
        y = y.mul_(2).relu_() if in_place else y.mul(2).relu()
        gradients.append(torch.autograd.grad(y.sum(), list(layer.parameters())))
    assert all(map(torch.equal, *gradients))
