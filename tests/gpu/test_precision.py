"""Low precision on a GPU: kernels against the reference, operators against fp64, training against autocast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.timing import milliseconds, over_copy
from tests.support.requirements import requires
from torch import nn

from trimtab.api.set_precision import set_precision
from trimtab.models.data import tokens
from trimtab.models.gpt import Gpt
from trimtab.precision import reference
from trimtab.precision.devices import offers
from trimtab.precision.draw import Draw, Operand, base_key
from trimtab.precision.linear import draw_of, linear
from trimtab.precision_names import Precision

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = requires(cuda=1, modules=["triton"])

CUDA = torch.device("cuda")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BOUNDS = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 1e-2, "fp16": 2e-3, "fp8": 0.15, "int8": 0.03}
"""Relative error of a product in the Frobenius norm, of operands drawn from a normal distribution."""
NAMES = list(BOUNDS)


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


MODULES: dict[str, tuple[Any, Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "conv": ("conv", lambda: nn.Conv2d(32, 48, 3, padding=1), lambda: torch.randn(4, 32, 14, 14)),
    "grouped conv": (
        "conv",
        lambda: nn.Conv2d(32, 32, 3, stride=2, groups=4, bias=False),
        lambda: torch.randn(4, 32, 15, 15),
    ),
    "conv1d": (
        "conv",
        lambda: nn.Conv1d(16, 32, 5, padding=2, dilation=2),
        lambda: torch.randn(4, 16, 40),
    ),
    "attention": ("attention", Attention, lambda: torch.randn(2, 4, 64, 64)),
    "embedding": ("embedding", lambda: nn.Embedding(100, 64), lambda: torch.randint(100, (8, 16))),
}


@pytest.fixture(autouse=True)
def _same_values() -> None:
    torch.manual_seed(0)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm())


def skip_unless_offered(kind: Any, name: str) -> None:
    if name not in offers(CUDA)[kind]:
        pytest.skip(f"needs a GPU that offers {name} for {kind}")


@pytest.mark.parametrize("stochastic", [True, False], ids=["stochastic", "nearest"])
@pytest.mark.parametrize(("rows", "columns"), [(37, 53), (64, 4096), (5, 20000), (300, 130)])
def test_quantize_gives_the_reference_bits(rows: int, columns: int, stochastic: bool) -> None:
    from trimtab.precision.gpu.quantize import quantize_by_column, quantize_by_row, quantize_whole

    x = torch.randn(rows, columns) * torch.rand(rows, 1) * 2.0 ** -torch.randint(0, 24, (rows, columns))
    draw = Draw(base_key(1, 0, 99), torch.tensor([3], device=CUDA), stochastic)
    key = Draw(base_key(1, 0, 99), torch.tensor([3]), stochastic).key(Operand.INPUT)

    expected, scales = reference.quantize(x, "rows", key=key, stochastic=stochastic)
    codes, row_scales = quantize_by_row(x.cuda(), draw, Operand.INPUT)
    assert torch.equal(codes[:rows, :columns].cpu(), expected)
    assert torch.equal(row_scales.cpu(), scales)

    expected, scales = reference.quantize(x, "whole", key=key, stochastic=stochastic)
    codes, transposed, scale = quantize_whole(x.cuda(), torch.int8, draw, Operand.INPUT)
    assert torch.equal(codes[:rows, :columns].cpu(), expected)
    assert torch.equal(transposed, codes.t())
    assert scale.cpu() == scales[0]

    factor = torch.rand(rows)
    expected, scales = reference.quantize(x, "columns", key=key, stochastic=stochastic, row_factor=factor)
    codes, transposed, column_scales = quantize_by_column(
        x.cuda(), draw, Operand.INPUT, row_factor=factor.cuda(), direct=True
    )
    assert torch.equal(codes[:rows, :columns].cpu(), expected)
    assert torch.equal(transposed, codes.t())
    assert torch.equal(column_scales.cpu(), scales)

    for dtype in (E4M3, E5M2):
        codes, transposed, scale = quantize_whole(x.cuda(), dtype, draw, Operand.INPUT)
        expected, scales = reference.quantize_fp8(x, dtype, key=key, stochastic=stochastic)
        assert torch.equal(codes[:rows, :columns].cpu().view(torch.int8), expected.view(torch.int8))
        assert torch.equal(transposed.float(), codes.float().t())
        assert torch.equal(scale.cpu(), scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "columns", "length"), [(130, 70, 80), (1, 3, 16), (1000, 2000, 1024), (700, 500, 208)]
)
def test_int8_products_are_the_exact_sums(rows: int, columns: int, length: int, dtype: torch.dtype) -> None:
    """Scaled as the reference does, bit by bit."""
    from trimtab.precision.gpu.products import product, transpose

    a, b = (torch.randint(-127, 128, (n, length), dtype=torch.int8, device=CUDA) for n in (rows, columns))
    row, column, bias = (torch.rand(n, device=CUDA) / 64 for n in (rows, columns, columns))
    sums = (a.double() @ b.double().t()).to(torch.int64)
    expected = reference.dequantize(sums, row, column, bias).to(dtype)
    actual = product(a, b, rows, columns, dtype, row_scale=row, column_scale=column, bias=bias)
    assert torch.equal(actual, expected)
    assert torch.equal(transpose(a), a.t().contiguous())


def test_gradients_of_a_layer_are_those_of_the_single_kernels() -> None:
    """Bit by bit, with memory shared between kernels, by address and where an address is not aligned."""
    from tests.precision.triton_cases import gradient_faults

    shapes = ((37, 24, 53), (64, 48, 32), (1, 16, 16), (33, 1, 7), (1000, 304, 520))
    assert gradient_faults("cuda", shapes, rounding=(True, False), offsets=(0, 0, 1)) == []


def test_sums_too_long_for_int32_are_divided() -> None:
    from trimtab.precision.gpu.products import product
    from trimtab.precision.int8 import LONGEST_SUM

    a, b = (torch.full((16, LONGEST_SUM + 4096), 127, dtype=torch.int8, device=CUDA) for _ in range(2))
    exact = 127.0 * 127.0 * (LONGEST_SUM + 4096)
    for dtype in (torch.float32, torch.bfloat16):
        actual = product(a, b, 16, 16, dtype).double()
        assert bool(((actual / exact - 1).abs() < 2**-8).all())


@pytest.mark.parametrize("dtype", [torch.int8, E4M3, E5M2], ids=["int8", "e4m3", "e5m2"])
def test_stochastic_rounding_is_unbiased(
    dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    from trimtab.precision.gpu.quantize import quantize_whole

    x = torch.full((64, 4096), 0.3, device=CUDA)
    x[:, 0] = 1.0
    calls = torch.tensor([3], device=CUDA)
    total = torch.zeros_like(x)
    for seed in range(32):
        codes, _, scale = quantize_whole(x, dtype, Draw(base_key(seed, 0, 1), calls, True), Operand.INPUT)
        total += codes.float() * scale
    bias = float((total[:, 1:] / 32 - 0.3).mean().abs()) / 0.3
    record_property("bias", bias)
    assert bias < 2e-4


def test_nan_reaches_the_scale() -> None:
    from trimtab.precision.gpu.quantize import quantize_whole

    x = torch.full((64, 4096), 0.3, device=CUDA)
    x[3, 5] = float("nan")
    draw = Draw(1, torch.tensor([3], device=CUDA), False)
    assert bool(quantize_whole(x, E4M3, draw, Operand.INPUT)[2].isnan())


@pytest.mark.parametrize("name", [*NAMES, "mixed"])
def test_linear_is_near_fp64(name: str, record_property: Callable[[str, object], None]) -> None:
    """Forward and the three gradients, ragged and transposed shapes; an infinity stays one."""
    skip_unless_offered("linear", "fp8" if name == "mixed" else name)
    calls = torch.zeros(1, dtype=torch.int64, device=CUDA)
    mixed = Precision(forward="fp8", grad_input="bf16", grad_weight="fp32")
    precision = mixed if name == "mixed" else Precision.of(name)
    bound = max(BOUNDS[part] for part in precision.names)
    worst = 0.0
    for rows, inputs, outputs in ((37, 53, 24), (256, 512, 384), (1, 16, 16)):
        for transposed in (False, True):
            x = torch.randn(rows, inputs, device=CUDA, requires_grad=True)
            shape = (inputs, outputs) if transposed else (outputs, inputs)
            weight = torch.randn(shape, device=CUDA, requires_grad=True)
            bias = torch.randn(outputs, device=CUDA, requires_grad=True)
            g = torch.randn(rows, outputs, device=CUDA)
            y = linear(x, weight, bias, precision, draw_of(precision, 7, calls), transposed=transposed)
            grads = torch.autograd.grad(y, (x, weight, bias), g)
            wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
            straight = wide[1].t() if transposed else wide[1]
            y64 = F.linear(wide[0], straight, wide[2])
            grads64 = torch.autograd.grad(y64, wide, g.double())
            worst = max(worst, *map(relative, (y, *grads), (y64, *grads64)))
    record_property("worst_relative_error", worst)
    assert worst < bound
    x = torch.randn(64, 64, device=CUDA)
    x[3, 3] = float("inf")
    y = linear(x, torch.randn(64, 64, device=CUDA), None, precision, draw_of(precision, 7, calls))
    assert not bool(y[3].isfinite().any())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", MODULES)
def test_operator_is_near_fp64(case: str, name: str, record_property: Callable[[str, object], None]) -> None:
    kind, make, values = MODULES[case]
    skip_unless_offered(kind, name)
    model, x = nn.Sequential(make()).cuda(), values().cuda()
    wide = nn.Sequential(make()).cuda().double()
    wide.load_state_dict(model.state_dict())
    leaf = x.clone().requires_grad_(x.is_floating_point())
    leaf64 = x.double().requires_grad_() if x.is_floating_point() else x
    y64 = wide(leaf64)
    g = torch.randn_like(y64)
    grads64 = torch.autograd.grad(y64, [t for t in (leaf64, *wide.parameters()) if t.requires_grad], g)
    set_precision(model, {"0/attention" if kind == "attention" else "0": name})
    y = model(leaf)
    grads = torch.autograd.grad(y, [t for t in (leaf, *model.parameters()) if t.requires_grad], g.float())
    worst = max(map(relative, (y, *grads), (y64, *grads64)))
    record_property("worst_relative_error", worst)
    assert worst < 2 * BOUNDS[name]


@pytest.mark.parametrize("name", ["fp8", "int8", "bf16"])
def test_compiled_under_autocast(name: str) -> None:
    skip_unless_offered("linear", name)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
    set_precision(model, {"?*": name})
    x = torch.randn(64, 256, device=CUDA)
    with torch.autocast("cuda", torch.bfloat16):
        eager = model(x)
        compiled = torch.compile(model, fullgraph=True)(x)
    compiled.float().sum().backward()
    assert relative(compiled, eager) < BOUNDS[name]


def test_training_loses_nothing(record_property: Callable[[str, object], None]) -> None:
    """A small GPT for 60 steps in each precision, against autocast to bf16."""
    last: dict[str, float] = {}
    for name in ["bf16 autocast", *(name for name in ("fp8", "int8") if name in offers(CUDA)["linear"])]:
        torch.manual_seed(0)
        model = Gpt(width=256, layers=4, heads=4, context=128).cuda()
        if name != "bf16 autocast":
            set_precision(model, {"blocks.*": name})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        losses = []
        for step in range(60):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens(16, 128, step=step).cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        last[name] = float(torch.stack(losses[-10:]).mean())
    record_property("mean_loss_of_the_last_10_steps", last)
    assert len(last) > 1
    assert max(last.values()) < last["bf16 autocast"] + 0.1


def test_bandwidth_of_quantizing(record_property: Callable[[str, object], None]) -> None:
    """Fused largest magnitude and quantize, over copying the same tensor: 16384 × 8192 values of bf16."""
    from trimtab.precision.gpu.quantize import quantize_by_row, quantize_whole

    x = torch.randn(16384, 8192, device=CUDA, dtype=torch.bfloat16)
    into = torch.empty_like(x)
    calls = torch.zeros(1, dtype=torch.int64, device=CUDA)
    nearest, stochastic = Draw(1, calls, False), Draw(1, calls, True)
    times = over_copy(
        {
            "copy": lambda: into.copy_(x),
            "int8 by row, stochastic": lambda: quantize_by_row(x, stochastic, Operand.INPUT),
            "int8 by row, nearest": lambda: quantize_by_row(x, nearest, Operand.INPUT),
            "fp8 whole, both orders, nearest": lambda: quantize_whole(x, E4M3, nearest, Operand.INPUT),
            "fp8 whole, both orders, stochastic": lambda: quantize_whole(x, E5M2, stochastic, Operand.INPUT),
        }
    )
    record_property("time_over_copy", times)
    # Bytes read and written for each value: two for each reading, one for each code; a copy has four.
    moved = {"int8": 3, "fp8": 6}
    record_property(
        "of_copy_bandwidth",
        {name: round(moved[name[:4].strip()] / 4 / t, 3) for name, t in times.items() if name != "copy_ms"},
    )


def test_speed_of_the_products(record_property: Callable[[str, object], None]) -> None:
    """The bare matrix products, to tell what quantizing costs from what the product gains."""
    from trimtab.precision.gpu.products import product

    m, k, n = 8192, 4096, 16384
    a, b = torch.randn(m, k, device=CUDA).bfloat16(), torch.randn(n, k, device=CUDA).bfloat16()
    products: dict[str, Callable[[], object]] = {"bf16": lambda: a @ b.t()}
    if "int8" in offers(CUDA)["linear"]:
        a_int8, b_int8 = (t.clamp(-2, 2).mul(60).to(torch.int8) for t in (a, b))
        products["int8 of cuBLAS"] = lambda: torch._int_mm(a_int8, b_int8.t())
        products["int8"] = lambda: product(a_int8, b_int8, m, n, torch.bfloat16)
    if "fp8" in offers(CUDA)["linear"]:
        one, b_fp8 = torch.ones((), device=CUDA), b.to(E4M3)

        def scaled(x: torch.Tensor, fast: bool) -> torch.Tensor:
            return torch._scaled_mm(
                x, b_fp8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        for form, dtype in (("e4m3", E4M3), ("e5m2", E5M2)):
            x = a.to(dtype)
            products[f"fp8 {form} fast"] = lambda x=x: scaled(x, True)  # type: ignore[misc]
            products[f"fp8 {form} exact"] = lambda x=x: scaled(x, False)  # type: ignore[misc]
    times = milliseconds(products, repeats=7)
    record_property("tflops", {name: round(2 * m * k * n / ms / 1e9, 1) for name, ms in times.items()})


def test_every_offered_precision_is_timed(record_property: Callable[[str, object], None]) -> None:
    x, weight, g = (torch.randn(4096, 4096, device=CUDA, requires_grad=i < 2) for i in range(3))
    calls = torch.zeros(1, dtype=torch.int64, device=CUDA)

    def run(precision: Precision) -> object:
        y = linear(x, weight, None, precision, draw_of(precision, 0, calls))
        return torch.autograd.grad(y, (x, weight), g)

    names = offers(CUDA)["linear"]
    times = milliseconds({name: lambda name=name: run(Precision.of(name)) for name in names}, repeats=7)  # type: ignore[misc]
    assert set(times) == set(names)
    record_property("milliseconds", times)
