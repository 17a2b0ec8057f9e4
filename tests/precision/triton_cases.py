"""What the GPU's kernels and products get wrong, as JSON; run with TRITON_INTERPRET=1 where there is no GPU."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trimtab.precision import reference
from trimtab.precision.draw import Draw, Operand, base_key
from trimtab.precision.gpu.fp8 import Fp8
from trimtab.precision.gpu.gradients import input_gradient, weight_gradient
from trimtab.precision.gpu.int8 import Int8Cuda
from trimtab.precision.gpu.products import product, transpose
from trimtab.precision.gpu.quantize import (
    LONGEST_ROW_IN_REGISTERS,
    quantize_by_column,
    quantize_by_row,
    quantize_whole,
)
from trimtab.precision.int8 import LONGEST_SUM
from trimtab.precision.products import ColumnTotals, Operands, Products, Sizes

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def kernel_faults() -> list[str]:
    faults = []
    for rows, columns, spoil in (
        (37, 53, ""),
        (16, 64, "nan"),
        (5, 300, "inf"),
        (2, LONGEST_ROW_IN_REGISTERS + 40, ""),
        (3, 7, "zero"),
    ):
        torch.manual_seed(rows)
        # Some far below the largest, where 8-bit floats have their fixed step.
        x = torch.randn(rows, columns) * torch.rand(rows, 1) * 2.0 ** -torch.randint(0, 24, (rows, columns))
        if spoil == "zero":
            x[1] = 0
        elif spoil:
            x[1, 2] = float(spoil)
        factor = torch.rand(columns)
        for stochastic in (True, False):
            draw = Draw(base_key(1, 0, rows), torch.tensor([7]), stochastic)
            key = draw.key(Operand.INPUT)
            name = f"{rows}x{columns} {spoil} {'stochastic' if stochastic else 'nearest'}"
            codes, scales = quantize_by_row(x, draw, Operand.INPUT, column_factor=factor)
            expected = reference.quantize(x, "rows", key=key, stochastic=stochastic, column_factor=factor)
            faults += differing(f"rows {name}", codes, scales, expected)
            row_factor = torch.rand(rows)
            codes, flipped, scales = quantize_by_column(
                x, draw, Operand.INPUT, row_factor=row_factor, direct=True
            )
            expected = reference.quantize(x, "columns", key=key, stochastic=stochastic, row_factor=row_factor)
            faults += differing(f"columns {name}", codes, scales, expected)
            if not torch.equal(codes.t(), flipped):
                faults.append(f"columns, transposed {name}")
            if columns < 1000:
                codes, transposed, scale = quantize_whole(x, torch.int8, draw, Operand.INPUT)
                expected = reference.quantize(x, "whole", key=key, stochastic=stochastic)
                faults += differing(f"whole {name}", codes, scale.reshape(1), expected)
                if not torch.equal(codes.t(), transposed):
                    faults.append(f"transposed {name}")
                if not spoil:
                    faults += fp8_faults(x, draw, name)
    return faults


def differing(
    name: str, codes: torch.Tensor, scales: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor]
) -> list[str]:
    rows, columns = expected[0].shape
    inside = torch.equal(codes[:rows, :columns], expected[0])
    padding = int(codes[rows:].abs().sum()) + int(codes[:, columns:].abs().sum())
    same = torch.equal(scales.nan_to_num(-1), expected[1].nan_to_num(-1))
    return (
        []
        if inside and same and padding == 0
        else [f"{name}: codes {inside}, scales {same}, padding {padding}"]
    )


def fp8_faults(x: torch.Tensor, draw: Draw, name: str) -> list[str]:
    faults = []
    for dtype, (top, mantissa, least) in reference.FP8.items():
        codes, transposed, scale = quantize_whole(x, dtype, draw, Operand.INPUT)
        key = draw.key(Operand.INPUT)
        expected, expected_scale = reference.quantize_fp8(x, dtype, key=key, stochastic=draw.stochastic)
        values = codes[: len(x), : x.shape[1]]
        if not torch.equal(values.view(torch.int8), expected.view(torch.int8)):
            faults.append(f"{dtype} {name}: codes")
        scaled = x * (torch.tensor(top) / x.abs().max())
        step = 2.0 ** (scaled.abs().clamp_min(2.0**least).log2().floor() - mantissa)
        if not bool(((values.float() - scaled).abs() <= step * 1.001).all()):
            faults.append(f"{dtype} {name}: further than a step")
        if not torch.equal(transposed.float(), codes.float().t()):
            faults.append(f"{dtype} {name}: transposed")
        if not torch.equal(scale, expected_scale):
            faults.append(f"{dtype} {name}: scale")
    return faults


def bias_faults() -> list[str]:
    x = torch.linspace(0.01, 1.0, 512).reshape(8, 64)
    faults = []
    for dtype in (torch.int8, E4M3, E5M2):
        draws = []
        for seed in range(36):
            codes, _, scale = quantize_whole(
                x, dtype, Draw(base_key(seed, 0, 1), torch.tensor([0]), True), Operand.INPUT
            )
            draws.append(codes.float()[:8, :64] * scale)
        values = torch.stack(draws).double()
        deviation = values.std(0).mean() / 6 / 512**0.5
        if abs(float((values.mean(0) - x).mean())) > 5 * float(deviation):
            faults.append(f"{dtype} is biased")
    return faults


def product_faults() -> list[str]:
    faults = []
    kinds: list[tuple[str, Products, float]] = [
        ("fp8", Fp8(rounding="stochastic"), 0.12),
        ("int8", Int8Cuda(), 0.03),
        ("int8 tensor", Int8Cuda(by_row=False), 0.04),
    ]
    for name, products, largest in kinds:
        for m, n, k in ((37, 24, 53), (1, 16, 16), (33, 1, 7)):
            torch.manual_seed(m)
            x, w, g, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n), torch.randn(n)
            draw, sizes = Draw(5, torch.tensor([1]), True), Sizes(m, n, k)
            for transposed in (False, True):
                weight = w.t().contiguous().t() if transposed else w
                x_operands, w_operands = products.input(x, draw), products.weight(weight, draw)
                y = products.forward(x_operands, w_operands, bias, sizes, torch.float32)
                gradient = products.gradient(g, draw)
                gx = products.grad_input(gradient, products.saved(w_operands), sizes, torch.float32, draw)
                gw = products.grad_weight(gradient, products.saved(x_operands), sizes, transposed, draw)
                again = products.grad_weight(gradient, products.saved_input(x, draw), sizes, transposed, draw)
                if not torch.equal(again, gw):
                    faults.append(f"{name} {sizes}: an operand made again is another one")
                only = products.input(x, draw, backward=False), products.weight(weight, draw, backward=False)
                if not torch.equal(products.forward(*only, bias, sizes, torch.float32), y):
                    faults.append(f"{name} {sizes}: a forward pass alone is not that before a backward pass")
                gw = gw.t() if transposed else gw
                if "tensor" not in name:
                    faults += totals_faults(name, products, g, products.saved(x_operands), sizes, transposed)
                like = products.saved_like(x)
                if [(t.shape, t.dtype) for t in like] != [
                    (t.shape, t.dtype) for t in products.saved(x_operands)
                ]:
                    faults.append(f"{name} {sizes}: saves other tensors than it says")
                for actual, true in ((y, x @ w.t() + bias), (gx, g @ w), (gw, g.t() @ x)):
                    error = float((actual - true).norm() / true.norm())
                    if actual.shape != true.shape or error > largest:
                        faults.append(f"{name} {sizes} transposed {transposed}: {error}")
    return faults


def totals_faults(
    name: str, products: Products, g: torch.Tensor, x: Operands, sizes: Sizes, transposed: bool
) -> list[str]:
    """Sums of the gradient's columns on the way, which change nothing else."""
    draw, totals = Draw(5, torch.tensor([1]), True), ColumnTotals()
    plain = products.grad_weight(products.gradient(g, draw), x, sizes, transposed, draw)
    gradient = products.gradient(g, draw, totals)
    again = products.grad_weight(gradient, x, sizes, transposed, draw, totals)
    faults = [] if torch.equal(plain, again) else [f"{name} {sizes}: another gradient with totals"]
    if totals.parts is None or not torch.allclose(totals.of(g), g.sum(0), rtol=1e-5, atol=1e-5):
        faults.append(f"{name} {sizes}: totals")
    return faults


def gradient_faults(
    device: str,
    shapes: Sequence[tuple[int, int, int]] = ((37, 24, 53),),
    rounding: Sequence[bool] = (True,),
    offsets: Sequence[int] = (0,),
) -> list[str]:
    """The gradients of a whole layer against the same kernels one by one, bit by bit.

    Args:
        shapes: m, n and k.
        rounding: whether stochastic.
        offsets: of the gradient in its memory. A second time on a GPU kernels run by address, if it is aligned.
    """
    faults = []
    for m, n, k in shapes:
        sizes = Sizes(m, n, k)
        calls = torch.tensor([1], device=device)
        for stochastic in rounding:
            draw = Draw(5, calls, stochastic)
            for at in offsets:
                g = torch.randn(m * n + 1, device=device)[at : at + m * n].view(m, n)
                codes_x, scales_x = quantize_by_row(torch.randn(m, k, device=device), draw, Operand.INPUT)
                codes_w, scales_w = quantize_by_row(torch.randn(n, k, device=device), draw, Operand.WEIGHT)
                name = f"{sizes} {stochastic} {at}"
                by_row = quantize_by_row(g, draw, Operand.GRAD_FOR_INPUT, column_factor=scales_w)
                expected = product(by_row[0], transpose(codes_w), m, k, torch.float32, row_scale=by_row[1])
                whole = input_gradient(g.device, g.dtype, sizes, torch.float32, stochastic)
                assert whole is not None
                if not torch.equal(whole(g, codes_w, scales_w, draw), expected):
                    faults.append(f"input gradient {name}")
                for transposed in (False, True):
                    totals, again = ColumnTotals(), ColumnTotals()
                    _, codes, scales = quantize_by_column(
                        g, draw, Operand.GRAD_FOR_WEIGHT, row_factor=scales_x, totals=totals
                    )
                    if transposed:
                        expected = product(
                            transpose(codes_x), codes, k, n, torch.float32, column_scale=scales
                        )
                    else:
                        expected = product(codes, transpose(codes_x), n, k, torch.float32, row_scale=scales)
                    gradient = weight_gradient(g.device, g.dtype, sizes, stochastic, transposed)
                    assert gradient is not None
                    if not torch.equal(gradient(g, codes_x, scales_x, draw, None), expected):
                        faults.append(f"weight gradient {name} {transposed}")
                    if not torch.equal(gradient(g, codes_x, scales_x, draw, again), expected):
                        faults.append(f"weight gradient with totals {name} {transposed}")
                    if not torch.equal(again.of(g), totals.of(g)):
                        faults.append(f"totals {name} {transposed}")
    return faults


def band_faults() -> list[str]:
    """Totals of several bands of rows, ragged, and of values that a factor multiplies for the codes alone."""
    values, draw = torch.randn(9000, 40), Draw(3, torch.tensor([1]), False)
    factor = torch.full((9000,), 3.0)
    faults = []
    quantizers: tuple[Callable[[ColumnTotals | None], tuple[torch.Tensor, ...]], ...] = (
        lambda totals: quantize_by_column(values, draw, Operand.INPUT, row_factor=factor, totals=totals),
        lambda totals: quantize_whole(values, E5M2, draw, Operand.INPUT, totals=totals),
    )
    for quantize in quantizers:
        totals = ColumnTotals()
        with_totals, without = quantize(totals), quantize(None)
        if not all(torch.equal(a.float(), b.float()) for a, b in zip(with_totals, without, strict=True)):
            faults.append("bands: other codes with totals")
        if totals.parts is None or len(totals.parts) < 2:
            faults.append("bands: only one")
        elif not torch.allclose(totals.of(values), values.sum(0), rtol=1e-4, atol=1e-3):
            faults.append("bands: totals")
    return faults


def sum_faults() -> list[str]:
    """Products of codes against exact integer sums, scaled as the reference does."""
    faults = []
    # Ragged, several tiles each way, one row, and a sum that must be divided.
    for rows, columns, length in ((130, 70, 80), (300, 40, 192), (1, 3, 16), (16, 32, LONGEST_SUM + 48)):
        torch.manual_seed(rows)
        a, b = (torch.randint(-127, 128, (n, length), dtype=torch.int8) for n in (rows, columns))
        row, column, bias = torch.rand(rows), torch.rand(columns), torch.rand(columns)
        sums = (a.double() @ b.double().t()).to(torch.int64)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            scales = {"row_scale": row * 1e-4, "column_scale": column, "bias": bias}
            actual = product(a, b, rows, columns, dtype, **scales)
            expected = reference.dequantize(sums, row * 1e-4, column, bias).to(dtype)
            # The interpreter truncates to bf16, and parts of a sum are rounded one by one.
            loose = dtype == torch.bfloat16 or length > LONGEST_SUM
            near = torch.allclose(actual, expected, rtol=2**-7, atol=1e-3)
            if not near or not (loose or torch.equal(actual, expected)):
                faults.append(f"product {rows}x{columns}x{length} in {dtype}")
        plain = product(a, b, rows, columns, torch.float32)
        if not torch.allclose(plain.double(), sums.double(), rtol=1e-6):
            faults.append(f"sums {rows}x{columns}x{length}")
        if not torch.equal(transpose(a), a.t().contiguous()):
            faults.append(f"transpose {rows}x{length}")
    return faults


def allow_loops_over_arguments() -> None:
    """The interpreter of Triton 3.6 reads a loop's bound as a number, which numpy 2.4 allows of a scalar only."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if __name__ == "__main__":
    allow_loops_over_arguments()
    warnings.simplefilter("ignore")
    faults = kernel_faults() + bias_faults() + product_faults() + sum_faults() + band_faults()
    print(json.dumps(faults + gradient_faults("cpu")))
