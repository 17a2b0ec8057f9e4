"""Check and time every low-precision path on the GPU at hand; one JSON file, whatever fails on the way.

PYTHONPATH=src python3 tools/gpu_precision.py --json precision.json
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trimtab.api.set_precision import set_precision
from trimtab.bench.harness import interleave
from trimtab.bench.scenarios import precision as bench
from trimtab.models.gpt import Gpt, batch_of, text_bytes
from trimtab.precision import reference, triton_quantize
from trimtab.precision.devices import measure, offers
from trimtab.precision.draw import Draw, Operand, base_key
from trimtab.precision.linear import linear
from trimtab.precision.triton_quantize import quantize_by_row, quantize_whole
from trimtab.precision_names import Precision

if TYPE_CHECKING:
    from collections.abc import Callable

CUDA = torch.device("cuda")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BOUNDS = {"fp32": 1e-5, "tf32": 2e-3, "bf16": 1e-2, "fp16": 2e-3, "fp8": 0.15, "int8": 0.03}
"""Relative error of a product in the Frobenius norm, of operands drawn from a normal distribution."""


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm())


def check_kernels() -> dict[str, Any]:
    """The Triton kernels against the reference (int8: to the bit) and against torch's own casts (fp8)."""
    calls = torch.tensor([3], device=CUDA)
    host = torch.tensor([3])
    found: dict[str, Any] = {}
    for rows, columns in ((37, 53), (64, 4096), (5, 20000), (300, 130)):
        x = torch.randn(rows, columns) * torch.rand(rows, 1) * 2.0 ** -torch.randint(0, 24, (rows, columns))
        for stochastic in (True, False):
            base = base_key(1, 0, 99)
            draw, other = Draw(base, calls, stochastic), Draw(base, host, stochastic)
            key = other.key(Operand.INPUT)
            wanted, scales = reference.quantize(x, "rows", key=key, stochastic=stochastic)
            codes, got = quantize_by_row(x.cuda(), torch.int8, draw, Operand.INPUT)
            name = f"{rows}x{columns} {'stochastic' if stochastic else 'nearest'}"
            found[f"int8 rows {name}"] = bool(
                (codes[:rows, :columns].cpu() == wanted).all() and (got.cpu() == scales).all()
            )
            wanted, scales = reference.quantize(x, "whole", key=key, stochastic=stochastic)
            codes, turned, one = quantize_whole(x.cuda(), torch.int8, draw, Operand.INPUT)
            found[f"int8 whole {name}"] = bool(
                (codes[:rows, :columns].cpu() == wanted).all()
                and (turned == codes.t()).all()
                and one.cpu() == scales[0]
            )
            for dtype in (E4M3, E5M2):
                codes, turned, one = quantize_whole(x.cuda(), dtype, draw, Operand.INPUT)
                right, scale = reference.quantize_fp8(x, dtype, key=key, stochastic=stochastic)
                found[f"{dtype} {name}"] = bool(
                    torch.equal(codes[:rows, :columns].cpu().view(torch.int8), right.view(torch.int8))
                    and torch.equal(turned.float(), codes.float().t())
                    and torch.equal(one.cpu(), scale)
                )
    x = torch.full((64, 4096), 0.3, device=CUDA)
    x[:, 0] = 1.0
    for dtype in (torch.int8, E4M3, E5M2):
        total = torch.zeros_like(x)
        for seed in range(32):
            codes, _, scale = quantize_whole(x, dtype, Draw(base_key(seed, 0, 1), calls, True), Operand.INPUT)
            total += codes.float() * scale
        bias = float((total[:, 1:] / 32 - 0.3).mean().abs()) / 0.3
        found[f"unbiased {dtype}"] = bias < 2e-4
        found[f"bias {dtype}"] = bias
    x[3, 5] = float("nan")
    found["nan reaches the scale"] = bool(
        quantize_whole(x, E4M3, Draw(1, calls, False), Operand.INPUT)[2].isnan()
    )
    return found


def check_linear() -> dict[str, Any]:
    """Forward and both gradients against fp64, ragged and transposed shapes, each offered precision."""
    found: dict[str, Any] = {}
    calls = torch.zeros(1, dtype=torch.int64, device=CUDA)
    mixed = Precision(forward="fp8", grad_input="bf16", grad_weight="fp32")
    for precision in (*map(Precision.of, offers(CUDA)["linear"]), mixed):
        bound = max(BOUNDS[name] for name in precision.names)
        for rows, inputs, outputs in ((37, 53, 24), (256, 512, 384), (1, 16, 16)):
            for turned in (False, True):
                x = torch.randn(rows, inputs, device=CUDA, requires_grad=True)
                shape = (inputs, outputs) if turned else (outputs, inputs)
                weight = torch.randn(shape, device=CUDA, requires_grad=True)
                bias = torch.randn(outputs, device=CUDA, requires_grad=True)
                g = torch.randn(rows, outputs, device=CUDA)
                y = linear(x, weight, bias, precision, base=7, calls=calls, transposed=turned)
                grads = torch.autograd.grad(y, (x, weight, bias), g)
                wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
                straight = wide[1].t() if turned else wide[1]
                y64 = nn.functional.linear(wide[0], straight, wide[2])
                grads64 = torch.autograd.grad(y64, wide, g.double())
                errors = [relative(a, b) for a, b in zip((y, *grads), (y64, *grads64), strict=True)]
                name = f"{precision} {rows}x{inputs}x{outputs}{' turned' if turned else ''}"
                found[name] = {"errors": errors, "ok": max(errors) < bound, "type": str(grads[1].dtype)}
        x = torch.randn(64, 64, device=CUDA)
        x[3, 3] = float("inf")
        weight = torch.randn(64, 64, device=CUDA)
        y = linear(x, weight, None, precision, base=7, calls=calls)
        found[f"{precision} keeps Inf"] = not bool(y[3].isfinite().any())
    return found


def check_operators() -> dict[str, Any]:
    """Convolutions, attention and embedding through set_precision, and linear under compile and autocast."""
    found: dict[str, Any] = {}
    modules: list[tuple[str, nn.Module, torch.Tensor]] = [
        ("conv", nn.Conv2d(32, 48, 3, padding=1), torch.randn(4, 32, 14, 14)),
        ("conv", nn.Conv2d(32, 32, 3, stride=2, groups=4, bias=False), torch.randn(4, 32, 15, 15)),
        ("conv", nn.Conv1d(16, 32, 5, padding=2, dilation=2), torch.randn(4, 16, 40)),
        ("attention", bench._Attention(), torch.randn(2, 4, 64, 64)),
        ("embedding", nn.Embedding(100, 64), torch.randint(100, (8, 16))),
    ]
    for kind, module, x in modules:
        model = nn.Sequential(module).cuda()
        leaf = x.cuda().requires_grad_(x.is_floating_point())
        inputs = [t for t in (leaf, *model.parameters()) if t.requires_grad]
        wide = nn.Sequential(module).cuda().double()
        leaf64 = leaf.detach().double().requires_grad_() if x.is_floating_point() else leaf
        y64 = wide(leaf64)
        g = torch.randn_like(y64)
        inputs64 = [t for t in (leaf64, *wide.parameters()) if t.requires_grad]
        grads64 = torch.autograd.grad(y64, inputs64, g)
        wide.float()
        for name in offers(CUDA)[kind]:  # type: ignore[index]
            label = f"{kind} {tuple(x.shape)} {name}"
            try:
                set_precision(model, {"0/attention" if kind == "attention" else "0": name})
                inputs = [t for t in (leaf, *model.parameters()) if t.requires_grad]
                y = model(leaf)
                grads = torch.autograd.grad(y, inputs, g.float())
                errors = [relative(a, b) for a, b in zip((y, *grads), (y64, *grads64), strict=True)]
                found[label] = {"errors": errors, "ok": max(errors) < BOUNDS[name] * 2}
            except Exception as error:
                found[label] = {"ok": False, "error": repr(error)[:500]}
        set_precision(model, {})
    for name in ("fp8", "int8", "bf16"):
        label = f"compiled {name}"
        try:
            model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
            set_precision(model, {"*": name})
            x = torch.randn(64, 256, device=CUDA)
            with torch.autocast("cuda", torch.bfloat16):
                eager = model(x)
                compiled = torch.compile(model, fullgraph=True)(x)
            compiled.float().sum().backward()
            found[label] = {"ok": relative(compiled, eager) < BOUNDS[name], "type": str(eager.dtype)}
        except Exception as error:
            found[label] = {"ok": False, "error": repr(error)[:500]}
    return found


def check_training() -> dict[str, Any]:
    """A small GPT for 60 steps in each precision: losses side by side."""
    text = text_bytes(1 << 18)
    found: dict[str, Any] = {}
    for name in ("bf16 autocast", "fp8", "int8"):
        torch.manual_seed(0)
        model = Gpt(width=256, layers=4, heads=4, context=128).cuda()
        if name != "bf16 autocast":
            set_precision(model, {"blocks.*": name})
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        losses = []
        for step in range(60):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(batch_of(text, step, 16, 128).cuda())
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            losses.append(loss.detach())
        found[name] = {"last": float(torch.stack(losses[-10:]).mean()), "first": float(losses[0])}
    best = found["bf16 autocast"]["last"]
    for row in found.values():
        row["ok"] = row["last"] < best + 0.1
    return found


def time_products() -> list[dict[str, Any]]:
    """The bare matrix products, to tell what quantising costs from what the product gains."""
    rows: list[dict[str, Any]] = []
    one = torch.ones((), device=CUDA)
    for m, k, n in ((8192, 4096, 4096), (8192, 4096, 16384), (8192, 16384, 4096), (4096, 8192, 16384)):
        a, b = torch.randn(m, k, device=CUDA).bfloat16(), torch.randn(n, k, device=CUDA).bfloat16()
        a8, b8, a5 = a.to(E4M3), b.to(E4M3), a.to(E5M2)
        ai, bi = a.clamp(-2, 2).mul(60).to(torch.int8), b.clamp(-2, 2).mul(60).to(torch.int8)
        row_a, row_b = torch.ones(m, 1, device=CUDA), torch.ones(1, n, device=CUDA)

        def scaled(x: torch.Tensor, dtype: torch.dtype, fast: bool, b8: torch.Tensor = b8) -> torch.Tensor:
            return torch._scaled_mm(x, b8.t(), scale_a=one, scale_b=one, out_dtype=dtype, use_fast_accum=fast)

        cases: dict[str, Callable[[], Any]] = {
            "bf16": lambda a=a, b=b: a @ b.t(),  # type: ignore[misc]
            "fp8 fast": lambda a8=a8: scaled(a8, torch.bfloat16, True),  # type: ignore[misc]
            "fp8 exact": lambda a8=a8: scaled(a8, torch.bfloat16, False),  # type: ignore[misc]
            "fp8 e5m2 fast": lambda a5=a5: scaled(a5, torch.bfloat16, True),  # type: ignore[misc]
            "fp8 e5m2 exact": lambda a5=a5: scaled(a5, torch.bfloat16, False),  # type: ignore[misc]
            "fp8 e5m2 exact to fp32": lambda a5=a5: scaled(a5, torch.float32, False),  # type: ignore[misc]
            "fp8 by row fast": lambda a8=a8, b8=b8, ra=row_a, rb=row_b: torch._scaled_mm(  # type: ignore[misc]
                a8, b8.t(), scale_a=ra, scale_b=rb, out_dtype=torch.bfloat16, use_fast_accum=True
            ),
            "int8": lambda ai=ai, bi=bi: torch._int_mm(ai, bi.t()),  # type: ignore[misc]
        }
        working: dict[str, Callable[[], float]] = {}
        for name, run in cases.items():
            try:
                run()
            except Exception as error:
                rows.append({"shape": f"{m}x{k}x{n}", "product": name, "error": repr(error)[:300]})
                continue
            working[name] = lambda run=run: bench._seconds(run, CUDA, 5)  # type: ignore[misc]
        for name, timing in interleave(working, warmup=2, repeats=5).items():
            tflops = 2 * m * k * n / timing.median_ms / 1e9
            rows.append({"shape": f"{m}x{k}x{n}", "product": name, "ms": timing.median_ms, "tflops": tflops})
    return rows


def time_quantise() -> list[dict[str, Any]]:
    return bench._quantise_rows(CUDA, 7)


def time_tiles() -> list[dict[str, Any]]:
    """Which tile suits the transposing kernel: milliseconds for 16384 × 8192 values of bf16."""
    x = torch.randn(16384, 8192, device=CUDA, dtype=torch.bfloat16)
    calls = torch.zeros(1, dtype=torch.int64, device=CUDA)
    rows = []
    before = triton_quantize.TILE
    for tile in (
        (64, 64, 4),
        (64, 128, 4),
        (128, 64, 4),
        (128, 64, 8),
        (128, 128, 8),
        (64, 128, 8),
        (32, 128, 4),
        (64, 256, 8),
        (32, 256, 4),
    ):
        triton_quantize.TILE = tile
        for name, stochastic, dtype in (("nearest", False, E4M3), ("stochastic", True, E5M2)):
            draw = Draw(1, calls, stochastic)

            def run(draw: Draw = draw, dtype: torch.dtype = dtype) -> Any:
                return quantize_whole(x, dtype, draw, Operand.INPUT)

            run()
            timed = {"run": lambda run=run: bench._seconds(run, CUDA, 5)}
            timing = interleave(timed, warmup=1, repeats=5)["run"]
            rows.append({"tile": tile, "rounding": name, "ms": timing.median_ms})
    triton_quantize.TILE = before
    return rows


def time_rows() -> list[dict[str, Any]]:
    """How many values of a row suit a warp: milliseconds for 16384 × 8192 values of bf16 by rows."""
    x = torch.randn(16384, 8192, device=CUDA, dtype=torch.bfloat16)
    calls = torch.zeros(1, dtype=torch.int64, device=CUDA)
    rows = []
    before = triton_quantize.PER_WARP
    for values in (256, 512, 1024, 2048):
        triton_quantize.PER_WARP = values
        for name, stochastic in (("nearest", False), ("stochastic", True)):
            draw = Draw(1, calls, stochastic)

            def run(draw: Draw = draw) -> Any:
                return quantize_by_row(x, torch.int8, draw, Operand.INPUT)

            run()
            timed = {"run": lambda run=run: bench._seconds(run, CUDA, 5)}
            timing = interleave(timed, warmup=1, repeats=5)["run"]
            rows.append({"values a warp": values, "rounding": name, "ms": timing.median_ms})
    triton_quantize.PER_WARP = before
    return rows


def time_linear() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for shape in bench.LINEAR["cuda"]:
        m, k, n = map(int, shape.split("x"))
        x = torch.randn(m, k, device=CUDA, dtype=torch.bfloat16)
        rows += bench._operator_rows("linear", shape, nn.Linear(k, n).cuda(), x, 5)
    return rows


def time_step() -> list[dict[str, Any]]:
    return bench._step_rows(CUDA, 7, lambda done, total: None)


def profile_step() -> dict[str, Any]:
    """Where the GPU's time goes in a step: kernels by total time, bf16 and fp8."""
    from torch.profiler import ProfilerActivity, profile

    size = bench.STEP["cuda"]
    text = text_bytes(1 << 18)
    found: dict[str, Any] = {}
    for name in ("bf16", "fp8"):
        torch.manual_seed(0)
        with CUDA:
            model = Gpt(
                width=size["width"], layers=size["layers"], heads=size["heads"], context=size["context"]
            )
        if name == "fp8":
            set_precision(model, {"blocks.*": "fp8"})
        optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        step = bench._step(model, optimiser, text, [], size["sequences"], size["context"], CUDA)
        step()
        step()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            step()
        kernels = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
        kernels.sort(key=lambda e: -e.self_device_time_total)
        found[name] = [
            {"kernel": e.key[:90], "ms": e.self_device_time_total / 1e3, "count": e.count}
            for e in kernels[:25]
        ]
        del model, optimiser, step
        torch.cuda.empty_cache()
    return found


def measured() -> list[dict[str, Any]]:
    return [vars(row) for row in measure(CUDA, shape=(4096, 4096, 4096))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default="", help="run the sections whose names begin so: check, time, ...")
    asked = parser.parse_args()
    out = asked.json
    sections: dict[str, Callable[[], Any]] = {
        "check_kernels": check_kernels,
        "check_linear": check_linear,
        "check_operators": check_operators,
        "time_quantise": time_quantise,
        "time_tiles": time_tiles,
        "time_rows": time_rows,
        "time_products": time_products,
        "time_linear": time_linear,
        "time_step": time_step,
        "profile_step": profile_step,
        "check_training": check_training,
        "measure": measured,
    }
    sections = {name: run for name, run in sections.items() if name.startswith(asked.only)}
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "offers": {kind: list(names) for kind, names in offers(CUDA).items()},
    }
    for name, section in sections.items():
        start = time.perf_counter()
        try:
            report[name] = section()
        except Exception:
            report[name] = {"failed": traceback.format_exc()[-3000:]}
        report[f"{name}_s"] = time.perf_counter() - start
        out.write_text(json.dumps(report, indent=1))
        torch.cuda.empty_cache()
        print(
            f"{name}: {report[f'{name}_s']:.1f} s", "FAILED" if "failed" in report[name] else "", flush=True
        )
    bad = [
        f"{part}: {name}"
        for part in sections
        if part.startswith("check")
        for name, row in report[part].items()
        if row is False or (isinstance(row, dict) and row.get("ok") is False)
    ]
    print("not right:", bad or "nothing")
    for part in ("time_quantise", "time_tiles", "time_rows", "time_linear", "time_step"):
        for row in report[part] if isinstance(report.get(part), list) else []:
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    if bad or any("failed" in report[name] for name in sections):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
