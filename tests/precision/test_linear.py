"""Linear layers in every precision of this device against fp64, with the bounds their rounding allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.precision.bounds import RELATIVE, half_error, int8_step, product_bound

from trimtab.precision.devices import offers
from trimtab.precision.linear import draw_of, linear
from trimtab.precision_names import Precision

CPU = torch.device("cpu")
SHAPES = [(37, 53, 24), (1, 16, 16), (64, 96, 130), (5, 1, 3), (128, 8, 1)]
ALL = [name for name in ("fp32", "bf16", "fp16", "int8") if name in offers(CPU)["linear"]]


def calls(count: int = 0) -> torch.Tensor:
    return torch.tensor([count])


def lowered(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    precision: Precision,
    *,
    base: int,
    transposed: bool = False,
) -> torch.Tensor:
    draw = draw_of(precision, base, calls())
    return linear(x, weight, bias, precision, draw, transposed=transposed)


def case(shape: tuple[int, int, int], transposed: bool) -> tuple[torch.Tensor, ...]:
    rows, inputs, outputs = shape
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator) * torch.logspace(-2, 2, rows)[:, None]
    weight = torch.randn(outputs, inputs, generator=generator) * torch.logspace(-1, 1, outputs)[:, None]
    bias, g = torch.randn(outputs, generator=generator), torch.randn(rows, outputs, generator=generator)
    weight = weight.t().contiguous() if transposed else weight
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), g


def run(
    precision: Precision | str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    g: torch.Tensor, transposed: bool = False, base: int = 3,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    y = lowered(x, weight, bias, Precision.of(precision), base=base, transposed=transposed)
    expected = [t for t in (x, weight, bias) if t is not None]
    return (y, *torch.autograd.grad(y, expected, g))


def bounds(name: str, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of y, gx and gw, for w outputs × inputs, all in fp64."""
    if name != "int8":
        ex, ew, eg = (half_error(t, name) for t in (x, w, g))
        last = 2 * RELATIVE[name]
        # Below its normal range fp16 has a step, in a result as in an operand.
        step = 2.0**-24 if name == "fp16" else 0.0
        of_gradients = step * float(g.abs().max())
        return (
            product_bound(x, w.t(), ex, ew.t(), last) + step,
            product_bound(g, w, eg, ew, last) + of_gradients,
            product_bound(g.t(), x, eg.t(), ex, last) + of_gradients,
        )
    ex, ew = int8_step(x, "rows"), int8_step(w, "rows")
    # The gradient is quantized with the other operand's scales folded in: its error, unfolded again.
    eg_input = int8_step(g * ew[:, 0], "rows") / ew[:, 0]
    eg_weight = int8_step(g * ex[:, :1], "columns") / ex[:, :1]
    return (
        product_bound(x, w.t(), ex, ew.t(), 2.0**-22),
        product_bound(g, w, eg_input, ew, 2.0**-22),
        product_bound(g.t(), x, eg_weight.t(), ex, 2.0**-22),
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ALL)
def test_products_are_within_the_bound_of_their_rounding(
    name: str, shape: tuple[int, int, int], transposed: bool
) -> None:
    x, weight, bias, g = case(shape, transposed)
    y, gx, gw, gb = run(name, x, weight, bias, g, transposed)
    x64, w64, g64 = x.detach().double(), weight.detach().double(), g.double()
    w64 = w64.t() if transposed else w64
    gw = gw.t() if transposed else gw
    exact = (x64 @ w64.t(), g64 @ w64, g64.t() @ x64)
    outputs = (y.detach() - bias.detach(), gx, gw)
    slack = bias.detach().double().abs() * RELATIVE.get(name, 2.0**-23) * 4 + y.detach().abs() * 2.0**-22
    of_y, *of_gradients = bounds(name, x64, w64, g64)
    for actual, true, bound in zip(outputs, exact, (of_y + slack, *of_gradients), strict=True):
        assert bool(((actual.double() - true).abs() <= bound).all())
    torch.testing.assert_close(gb, g.sum(0))
    assert (gw.dtype, gx.dtype, y.dtype) == (torch.float32,) * 3


@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_int8_gradients_are_unbiased(scales: Any) -> None:
    x, weight, bias, g = case((24, 32, 16), False)
    precision = Precision(forward="int8", grad_input="int8", grad_weight="int8", scales=scales)
    draws = [run(precision, x, weight, bias, g, base=seed) for seed in range(100)]
    exact = (F.linear(x, weight, bias), g @ weight, g.t() @ x)
    for i, true in enumerate(exact):
        values = torch.stack([d[i].detach() for d in draws]).double()
        deviation = values.std(0) / 100**0.5
        excess = (values.mean(0) - true.detach().double()).abs() / deviation.clamp_min(
            1e-6 * float(true.detach().abs().max())
        )
        assert float(excess.max()) < 6
        assert float(excess.mean()) < 1.1  # a normal deviate's is 0.8


def test_int8_noise_is_what_the_planner_expects() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 128), torch.randn(96, 128)
    precision = Precision(forward="int8", grad_input="int8", grad_weight="int8", scales="tensor")
    exact = x.double() @ weight.double().t()
    errors = [lowered(x, weight, None, precision, base=seed).double() - exact for seed in range(40)]
    measured = float(torch.stack(errors).square().sum((1, 2)).mean())
    variance = [float(t.abs().max() / 127) ** 2 * t.numel() / 6 for t in (x, weight)]
    # ‖w‖² σ²(x) + ‖x‖² σ²(w), with σ² spread evenly over the elements of a row that are summed.
    expected = float(weight.square().sum()) * variance[0] / 128 + float(x.square().sum()) * variance[1] / 128
    assert measured == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("which", ["forward", "grad_input", "grad_weight"])
@pytest.mark.parametrize("name", [name for name in ALL if name != "fp32"])
def test_each_product_has_its_own_precision(name: str, which: str) -> None:
    x, weight, bias, g = case((32, 48, 40), False)
    chosen = dict.fromkeys(("forward", "grad_input", "grad_weight"), "fp32") | {which: name}
    mixed = run(Precision(**chosen), x, weight, bias, g)  # type: ignore[arg-type]
    exact = run("fp32", x, weight, bias, g)
    low = run(name, x, weight, bias, g)
    for i, part in enumerate(("forward", "grad_input", "grad_weight")):
        assert torch.equal(mixed[i], (low if part == which else exact)[i]), part
        assert not torch.equal(low[i], exact[i])


@pytest.mark.parametrize(("name", "ratio"), [("bf16", 0.5), ("int8", 0.25)])
def test_operands_are_saved_in_the_low_precision(name: str, ratio: float) -> None:
    if name not in ALL:
        pytest.skip(f"this CPU does not offer {name}")
    x, weight = torch.randn(256, 512, requires_grad=True), torch.randn(64, 512, requires_grad=True)
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        lowered(x, weight, None, Precision.of(name), base=0)
    saved = sum(t.nbytes for t in kept if t.data_ptr() != weight.data_ptr())
    assert saved <= x.nbytes * ratio + 256 * 4


@pytest.mark.parametrize("name", [name for name in ALL if name != "fp32"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(name: str, value: float) -> None:
    for where in range(3):
        x, weight, _, g = case((16, 24, 8), False)
        with torch.no_grad():
            (x, weight, g)[where][3, 4] = value
        y, gx, gw = run(name, x, weight, None, g)
        spoilt = [not bool(t.isfinite().all()) for t in (y, gx, gw)]
        assert spoilt == [where != 2, where != 0, where != 1]


def test_fp16_needs_no_loss_scaling() -> None:
    x, weight, bias, g = case((16, 24, 8), False)
    for scale in (1e-12, 1.0, 1e9):
        _, gx, gw, _ = run("fp16", x, weight, bias, g * scale)
        torch.testing.assert_close(gx, g * scale @ weight.detach(), rtol=2e-2, atol=2e-3 * scale * 20)
        torch.testing.assert_close(gw, (g * scale).t() @ x.detach(), rtol=2e-2, atol=2e-1 * scale)


@pytest.mark.parametrize("name", ALL)
def test_shapes_types_and_what_needs_no_gradient(name: str) -> None:
    weight = torch.randn(6, 8, requires_grad=True)
    x = torch.randn(2, 3, 4, 8)
    y = lowered(x, weight, None, Precision.of(name), base=0)
    assert y.shape == (2, 3, 4, 6)
    y.sum().backward()
    assert weight.grad is not None
    assert x.grad is None
    half = lowered(x.bfloat16(), weight, None, Precision.of(name), base=0)
    assert half.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        cast = lowered(x.requires_grad_(), weight, None, Precision.of(name), base=0)
    assert cast.dtype == torch.bfloat16
    cast.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    empty = lowered(x[:0], weight, None, Precision.of(name), base=0)
    assert empty.shape == (0, 3, 4, 6)
    empty.sum().backward()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_registered_operators_keep_their_promises(name: str, transposed: bool) -> None:
    x, weight, bias, _ = case((6, 8, 4), transposed)
    arguments = (x, weight, bias, calls(), 3, Precision.of(name).encode(), transposed, torch.float32)
    torch.library.opcheck(torch.ops.trimtab.linear.default, arguments)


@pytest.mark.parametrize("name", ALL)
def test_compiled_it_gives_the_same(name: str) -> None:
    x, weight, bias, g = case((16, 24, 8), False)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return lowered(x, weight, bias, Precision.of(name), base=3)

    y = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    compiled = (y, *torch.autograd.grad(y, (x, weight, bias), g))
    torch._dynamo.reset()
    for a, b in zip(compiled, run(name, x, weight, bias, g), strict=True):
        torch.testing.assert_close(a, b)
