"""Where the time of a layer in 8 bits goes on a GPU: host, quantizing, products; and which tiles are fastest.

    PYTHONPATH=src:. python -m benchmarks.studies.precision_kernels OUT.json
    PYTHONPATH=src:. python -m benchmarks.studies.precision_kernels --layers OUT.json     # half a minute: layers alone

Times of the GPU alone are taken behind a kernel that waits, so that the host has queued everything before.
"""

from __future__ import annotations

import cProfile
import importlib.util
import io
import json
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trimtab.api.set_precision import set_precision
from trimtab.precision import linear as linear_module
from trimtab.precision.draw import Draw, Operand
from trimtab.precision.gpu import gradients as gradients_module
from trimtab.precision.gpu import products as products_module
from trimtab.precision.gpu import quantize as quantize_module
from trimtab.precision.gpu import quantize_kernels
from trimtab.precision.gpu.products import Tile
from trimtab.precision.products import ColumnTotals

gradients: Any = gradients_module
linear: Any = linear_module
products: Any = products_module
quantize: Any = quantize_module
"""Candidates are put in the place of what these modules have."""

ROWS = 8192
LAYERS = ((4096, 4096), (4096, 12288), (4096, 16384), (16384, 4096))
TILES: dict[str, tuple[Tile, int]] = {
    "128x128x128 w8 s3 g8": (Tile(128, 128, 128, 8, 3), 8),
    "128x128x128 w8 s3 g16": (Tile(128, 128, 128, 8, 3), 16),
    "128x128x128 w4 s4 g16": (Tile(128, 128, 128, 4, 4), 16),
    "128x256x128 w8 s3 g8": (Tile(128, 256, 128, 8, 3), 8),
    "128x256x128 w8 s3 g16": (Tile(128, 256, 128, 8, 3), 16),
    "128x256x128 w8 s4 g16": (Tile(128, 256, 128, 8, 4), 16),
    "128x256x64 w8 s4 g16": (Tile(128, 256, 64, 8, 4), 16),
    "256x128x128 w8 s3 g8": (Tile(256, 128, 128, 8, 3), 8),
    "256x128x128 w8 s4 g8": (Tile(256, 128, 128, 8, 4), 8),
}


def forget() -> None:
    """Forget what was decided for shapes."""
    for cached in (
        products.multiply_launch,
        products.tiles_of,
        quantize.tiles_launch,
        quantize._largest,
        quantize.rows_launch,
        quantize.survey_of_columns,
        gradients.input_gradient,
        gradients.weight_gradient,
    ):
        cached.cache_clear()


@contextmanager
def tiles(name: str) -> Iterator[None]:
    before = dict(products.TILES), products.GROUP
    tile, group = TILES[name]
    products.TILES = dict.fromkeys(products.TILES, (tile,))
    products.GROUP = group
    forget()
    try:
        yield
    finally:
        products.TILES, products.GROUP = before
        forget()


def layer(inputs: int, outputs: int, precision: str | None) -> Callable[[bool], None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs, device="cuda"))
    if precision:
        set_precision(model, {"0": precision})
    x = torch.randn(ROWS, inputs, device="cuda", dtype=torch.bfloat16)
    g = torch.randn(ROWS, outputs, device="cuda", dtype=torch.bfloat16)

    def run(backward: bool) -> None:
        for parameter in model.parameters():
            parameter.grad = None
            torch.autograd.graph.increment_version(parameter)
        leaf = x.detach().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            y = model(leaf)
        if backward:
            y.backward(g)

    return run


def timed(run: Callable[[], Any], calls: int = 10, repeats: int = 3) -> tuple[float, float]:
    """Milliseconds of a call: of the GPU alone, and of the host."""
    best = [1e9, 1e9]
    run()
    for _ in range(repeats):
        torch.cuda.synchronize()
        torch.cuda._sleep(60_000_000)  # about 30 ms
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        host = (time.perf_counter() - start) * 1e3 / calls
        end.record()
        end.synchronize()
        best = [min(best[0], begin.elapsed_time(end) / calls), min(best[1], host)]
    return round(best[0], 4), round(best[1], 4)


def product_ms(inputs: int, outputs: int) -> float:
    """The three products of a layer, one after another."""

    def make(*shape: int) -> torch.Tensor:
        return torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")

    x, w, g = make(ROWS, inputs), make(outputs, inputs), make(ROWS, outputs)
    gt, xt, wt = (products.transpose(t) for t in (g, x, w))
    rows, columns = (torch.rand(n, device="cuda") for n in (max(ROWS, outputs), max(inputs, outputs)))
    bias = torch.rand(outputs, device="cuda")

    def run() -> None:
        half = torch.bfloat16
        products.product(x, w, ROWS, outputs, half, row_scale=rows, column_scale=columns, bias=bias)
        products.product(g, wt, ROWS, inputs, half, row_scale=rows)
        products.product(gt, xt, outputs, inputs, torch.float32, row_scale=rows)

    return timed(run)[0]


def compile_only(name: str) -> None:
    with tiles(name):
        product_ms(4096, 4096)


def without_reversal() -> Any:
    """The kernels as they were: the tiles of a matrix in the order in which it was read before."""
    source = Path(quantize_kernels.__file__).read_text()
    reversed_order = "tl.num_programs(0) - 1 - tl.program_id(0)"
    assert reversed_order in source
    path = Path(tempfile.mkdtemp()) / "kernels_in_order.py"
    path.write_text(source.replace(reversed_order, "tl.program_id(0)"))
    spec = importlib.util.spec_from_file_location("kernels_in_order", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def quantizers() -> dict[str, float]:
    """Of one matrix; in order and with the last tiles first."""
    calls = torch.zeros(1, dtype=torch.int64, device="cuda")
    draw = Draw(1, calls, True)
    results: dict[str, float] = {}
    for columns in (4096, 16384):
        x = torch.randn(ROWS, columns, device="cuda", dtype=torch.bfloat16)
        factor = torch.rand(ROWS, device="cuda")
        codes = torch.randint(-127, 128, (ROWS, columns), dtype=torch.int8, device="cuda")
        cases: dict[str, Any] = {
            "rows": lambda x=x: quantize.quantize_by_row(x, draw, Operand.INPUT),
            "columns": lambda x=x, f=factor: quantize.quantize_by_column(
                x, draw, Operand.INPUT, row_factor=f
            ),
            "columns, totals": lambda x=x, f=factor: quantize.quantize_by_column(
                x, draw, Operand.INPUT, row_factor=f, totals=ColumnTotals()
            ),
            "fp8": lambda x=x: quantize.quantize_whole(x, torch.float8_e4m3fn, draw, Operand.INPUT),
            "fp8, totals": lambda x=x: quantize.quantize_whole(
                x, torch.float8_e5m2, draw, Operand.INPUT, totals=ColumnTotals()
            ),
            "torch sum": lambda x=x: x.sum(0, dtype=torch.float32),
            "transpose": lambda codes=codes: products.transpose(codes),
        }
        original = quantize.kernels
        for order, module in (("last first", original), ("in order", without_reversal())):
            quantize.kernels = module
            forget()
            for name, run in cases.items():
                if order == "last first" or name in ("columns", "fp8"):
                    results[f"{columns} {name}, {order}"] = timed(run)[0]
        quantize.kernels = original
        forget()
    return results


def kernels_of(run: Callable[[bool], None]) -> dict[str, float]:
    """Microseconds of each kernel in one call."""
    from torch.profiler import ProfilerActivity, profile

    run(True)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        for _ in range(5):
            run(True)
        torch.cuda.synchronize()
    rows = [(e.key[:60], e.self_device_time_total / 5) for e in profiled.key_averages()]
    return {name: round(us, 1) for name, us in sorted(rows, key=lambda row: -row[1])[:16] if us > 1}


def host_profile(run: Callable[[bool], None]) -> str:
    torch.cuda.synchronize()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(30):
        run(True)
    profiler.disable()
    torch.cuda.synchronize()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(30)
    return text.getvalue()


def layers_only(path: str) -> None:
    """Times of whole layers, bf16 twice, of the GPU alone and of the host."""
    result: dict[str, Any] = {}
    for inputs, outputs in LAYERS:
        for name in ("bf16", "bf16 (again)", "int8", "fp8"):
            run = layer(inputs, outputs, None if name.startswith("bf16") else name)
            for what, backward in (("forward", False), ("forward+backward", True)):
                gpu, host = timed(partial(run, backward), repeats=9)
                result[f"{inputs}x{outputs} {name} {what}"] = {"gpu_ms": gpu, "host_ms": host}
    Path(path).write_text(json.dumps(result, indent=1))
    for case, times in result.items():
        print(f"{case:44} GPU {times['gpu_ms']:.3f} ms, host {times['host_ms']:.3f} ms")


def main(path: str) -> None:
    workers = [
        subprocess.Popen([sys.executable, "-m", "benchmarks.studies.precision_kernels", "--compile", name])
        for name in TILES
    ]
    for worker in workers:
        worker.wait()
    result: dict[str, Any] = {"products": {}, "layers": {}}

    def save() -> None:
        Path(path).write_text(json.dumps(result, indent=1))

    for inputs, outputs in LAYERS:
        at = result["products"].setdefault(f"{inputs}x{outputs}", {})
        at["chosen"] = product_ms(inputs, outputs)
        for name in TILES:
            try:
                with tiles(name):
                    at[name] = product_ms(inputs, outputs)
            except Exception as error:  # a tile that does not fit must not end the others
                at[name] = str(error)[:100]
    save()
    original = linear.backward_pass
    for inputs, outputs in LAYERS:
        at = result["layers"].setdefault(f"{inputs}x{outputs}", {})
        for precision in (None, "int8", "fp8"):
            run = layer(inputs, outputs, precision)
            for what, backward in (("forward", False), ("forward+backward", True)):
                gpu, host = timed(partial(run, backward))
                at[f"{precision or 'bf16'} {what}"] = {"gpu_ms": gpu, "host_ms": host}
            if precision:
                linear.backward_pass = lambda *arguments: original(*arguments[:8])
                gpu, host = timed(partial(run, True))
                at[f"{precision} forward+backward, bias apart"] = {"gpu_ms": gpu, "host_ms": host}
                linear.backward_pass = original
                if precision == "int8":
                    for name in TILES:
                        try:
                            with tiles(name):
                                at[f"int8 {name}"] = timed(partial(run, True), repeats=2)[0]
                        except Exception as error:
                            at[f"int8 {name}"] = str(error)[:100]
            if (inputs, outputs) == (4096, 4096):
                at[f"{precision or 'bf16'} kernels"] = kernels_of(run)
                print(precision, host_profile(run))
        save()
    result["quantizers"] = quantizers()
    save()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    if sys.argv[1] == "--compile":
        compile_only(sys.argv[2])
    elif sys.argv[1] == "--layers":
        layers_only(sys.argv[2])
    else:
        main(sys.argv[1])
