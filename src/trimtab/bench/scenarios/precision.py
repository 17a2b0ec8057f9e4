"""`trimtab bench precision`: what lower precision gains, operator by operator and in a whole step.

Baseline: what a user would run instead, fp32 on a CPU (one thread), autocast to bf16 on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trimtab.api.set_precision import set_precision
from trimtab.bench.harness import AA, Progress, Result, interleave
from trimtab.bench.trainer import Trainer, autocast
from trimtab.measure.timing import call_seconds
from trimtab.models import tasks
from trimtab.precision.devices import offers
from trimtab.precision.worth import passed_over
from trimtab.precision_names import OPERATOR_PRECISIONS, OperatorKind, Precision

LINEAR = {
    "cpu": ("512x768x3072", "512x3072x768", "512x768x768"),
    "cuda": ("8192x4096x16384", "8192x4096x4096"),
}
WARMUP = 2
STEP = {
    "cpu": {"width": 768, "layers": 4, "heads": 12, "context": 128, "sequences": 4},
    "cuda": {"width": 4096, "layers": 2, "heads": 32, "context": 1024, "sequences": 8},
}

LEARNING_RATE = {"cpu": 3e-4, "cuda": 1e-5}
"""So small that the loss falls from the first step on: at 3e-4 without a warm-up, the loss at a width of 4096 first
climbs far above that of a uniform guess, where small differences grow."""


class _Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def precision(device: str, repeats: int, progress: Progress) -> Result:
    """Rows for each operator, shape, precision and pass, then for whole steps of a GPT.

    `saved_bytes_ratio` is what autograd keeps besides parameters, relative to what it keeps in the baseline.
    `loss_change` is what the precision did to the loss of the last measured step, `first_loss_change` to that of the
    first: the same weights and the same batch. The A/A row starts from weights that are changed by as much as bf16
    would round them, so that its change is what chance does.
    """
    on = torch.device(device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = list(_operators(on))
        total = len(cases) + WARMUP + repeats
        rows: list[dict[str, Any]] = []
        for done, (operator, shape, module, x) in enumerate(cases):
            rows += _operator_rows(operator, shape, module, x, repeats)
            progress(done + 1, total)
        if on.type == "cuda":
            rows += _quantize_rows(on, repeats)
        rows += _step_rows(on, repeats, lambda done, _: progress(len(cases) + done, total))
    finally:
        torch.set_num_threads(threads)
    return Result(bench="precision", summary=_summary(rows, on), rows=rows)


def _operators(device: torch.device) -> Sequence[tuple[OperatorKind, str, nn.Module, torch.Tensor]]:
    cases: list[tuple[OperatorKind, str, nn.Module, torch.Tensor]] = []
    for shape in LINEAR[device.type]:
        rows, inputs, outputs = map(int, shape.split("x"))
        cases.append(("linear", shape, nn.Linear(inputs, outputs), torch.randn(rows, inputs)))
    cases.append(("conv", "8x64x28x28 k3", nn.Conv2d(64, 64, 3, padding=1), torch.randn(8, 64, 28, 28)))
    cases.append(("attention", "4x12x128x64", _Attention(), torch.randn(4, 12, 128, 64)))
    cases.append(("embedding", "512 of 8192x768", nn.Embedding(8192, 768), torch.randint(8192, (512,))))
    # Activations arrive in the type that autocast gives them.
    half = device.type == "cuda"
    return [
        (
            kind,
            shape,
            module.to(device),
            x.to(device, torch.bfloat16 if half and x.is_floating_point() else None),
        )
        for kind, shape, module, x in cases
    ]


def _operator_rows(
    kind: OperatorKind, shape: str, module: nn.Module, x: torch.Tensor, repeats: int
) -> list[dict[str, Any]]:
    baseline = _baseline(x.device)
    offered = offers(x.device)[kind]
    names = [
        name
        for name in offered
        if name in OPERATOR_PRECISIONS[kind]
        and name != baseline
        and (kind == "attention" or passed_over(module, kind, Precision.of(name), x.device) is None)
    ]
    runs: dict[str, Callable[[], float]] = {}
    saved: dict[str, int] = {}
    for name in (baseline, baseline + AA, *names):
        # Each precision in a module of its own over the same parameters, so that rounds can interleave.
        holder = nn.Sequential(_alias(module))
        pattern = "0/attention" if kind == "attention" else "0"
        if name in names:
            set_precision(holder, {pattern: name})
        saved[name] = _saved_bytes(holder, x)
        for which in ("forward", "forward+backward"):
            runs[f"{name}|{which}"] = _timed(holder, x, which)
    timings = interleave(runs, warmup=WARMUP, repeats=repeats)
    rows = []
    for key, timing in timings.items():
        name, which = key.split("|")
        speedup = timings[f"{baseline}|{which}"].ratio(timing)
        rows.append(
            {
                "operator": kind,
                "shape": shape,
                "precision": name,
                "pass": which,
                "ms": timing.median_ms,
                f"speedup_over_{baseline}": speedup,
                "slower": name in names and speedup < 1,
                "saved_bytes_ratio": saved[name] / saved[baseline] if saved[baseline] else 1.0,
            }
        )
    return rows


def _alias(module: nn.Module) -> nn.Module:
    """A module that shares the parameters of another."""
    copy = type(module).__new__(type(module))
    copy.__dict__.update(module.__dict__)
    return copy


def _timed(module: nn.Module, x: torch.Tensor, which: str) -> Callable[[], float]:
    def run() -> None:
        for parameter in module.parameters():
            parameter.grad = None
            # As after a step of an optimizer: what is kept of the weight does not serve again.
            torch.autograd.graph.increment_version(parameter)
        leaf = x.detach().requires_grad_(x.is_floating_point())
        with autocast(x.device):
            y = module(leaf)
        if which != "forward":
            y.backward(gradient)

    with autocast(x.device):
        gradient = torch.randn_like(module(x))

    def timed() -> float:
        # Queued, as in a model, where the host runs ahead of the GPU.
        return call_seconds(run, x.device, gpu_calls=5)

    return timed


def _saved_bytes(module: nn.Module, x: torch.Tensor) -> int:
    """Bytes that autograd keeps of one call besides parameters, each piece of memory once."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    leaf = x.detach().requires_grad_(x.is_floating_point())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(x.device):
        y = module(leaf)
    del y
    return sum(saved.values())


def _step_rows(device: torch.device, repeats: int, progress: Progress) -> list[dict[str, Any]]:
    size = STEP[device.type]
    baseline = _baseline(device)
    offered = offers(device)["linear"]
    lower = [name for name in ("bf16", "fp8", "int8") if name in offered and name != baseline]
    names = (baseline, baseline + AA, *lower)
    trainers = {
        name: _trainer(name if name in lower else None, device, nudged=name.endswith(AA)) for name in names
    }
    cases = {name: partial(_step, trainer) for name, trainer in trainers.items()}
    timings = interleave(cases, warmup=WARMUP, repeats=repeats, progress=progress)
    first = timings[baseline]
    return [
        {
            "operator": "step",
            "shape": f"gpt {size['width']} x {size['layers']}, {size['sequences'] * size['context']} tokens",
            "precision": name,
            "pass": "step",
            "ms": timing.median_ms,
            "spread": timing.spread,
            "step_speedup": first.ratio(timing),
            "loss": trainers[name].loss,
            "loss_change": trainers[name].loss - trainers[baseline].loss,
            "first_loss_change": trainers[name].losses[0] - trainers[baseline].losses[0],
        }
        for name, timing in timings.items()
    ]


def _trainer(precision: str | None, device: torch.device, *, nudged: bool) -> Trainer:
    size = dict(STEP[device.type])
    task = tasks.gpt(samples=size.pop("sequences"), **size, device=device)
    if nudged:
        generator = torch.Generator(device).manual_seed(1)
        with torch.no_grad():
            for parameter in task.model.parameters():
                change = torch.rand(parameter.shape, generator=generator, device=device) - 0.5
                parameter.mul_(1 + change * 2**-8)
    if precision is not None:
        set_precision(task.model, {"blocks.*": precision})
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=LEARNING_RATE[device.type], fused=True)
    return Trainer(task.model, optimizer, lambda step: task.batch(step=step), device, half=True)


def _step(trainer: Trainer) -> float:
    """Seconds of one step, which no other rank takes part in."""
    batch, losses = trainer.batch(len(trainer.losses)), []
    seconds = call_seconds(lambda: losses.append(trainer.train(batch)), trainer.device)
    trainer.losses.append(float(losses[-1]))
    return seconds


def _quantize_rows(device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """Finding the largest magnitude and quantizing in one kernel, relative to copying the same number of bytes."""
    from trimtab.precision.draw import Draw, Operand
    from trimtab.precision.gpu.quantize import quantize_by_row, quantize_whole

    x = torch.randn(16384, 8192, device=device, dtype=torch.bfloat16)
    into = torch.empty_like(x)
    calls = torch.zeros(1, dtype=torch.int64, device=device)
    nearest, stochastic = Draw(1, calls, False), Draw(1, calls, True)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    # Bytes read and written for each value: two for each reading, one for each code.
    cases: dict[str, tuple[Callable[[], Any], int]] = {
        "copy": (lambda: into.copy_(x), 4),
        "int8 by row, stochastic": (lambda: quantize_by_row(x, stochastic, Operand.INPUT), 3),
        "int8 by row, nearest": (lambda: quantize_by_row(x, nearest, Operand.INPUT), 3),
        "fp8 whole, both orders, nearest": (lambda: quantize_whole(x, e4m3, nearest, Operand.INPUT), 6),
        "fp8 whole, both orders, stochastic": (lambda: quantize_whole(x, e5m2, stochastic, Operand.INPUT), 6),
    }
    timed = {name: partial(call_seconds, run, device, gpu_calls=5) for name, (run, _) in cases.items()}
    timings = interleave(timed, warmup=WARMUP, repeats=repeats)
    copy = timings["copy"]
    return [
        {
            "operator": "quantise",
            "shape": "16384x8192 bf16",
            "precision": name,
            "pass": "quantise",
            "ms": timing.median_ms,
            "of_copy_bandwidth": cases[name][1] / 4 * copy.ratio(timing),
        }
        for name, timing in timings.items()
    ]


def _summary(rows: list[dict[str, Any]], device: torch.device) -> dict[str, float | bool | str]:
    baseline = _baseline(device)
    best = "fp8" if any(row["precision"] == "fp8" for row in rows) else "int8"
    summary: dict[str, float | bool | str] = {}
    for row in rows:
        main = row["precision"] == best
        if main and row["shape"] == LINEAR[device.type][0] and row["pass"] == "forward+backward":
            summary[f"{best}_linear_speedup"] = row[f"speedup_over_{baseline}"]
            summary[f"{best}_saved_bytes_ratio"] = row["saved_bytes_ratio"]
        if row["operator"] == "step" and row["precision"] == baseline + AA:
            summary["aa_loss_change"] = row["loss_change"]
        elif row["operator"] == "step" and row["precision"] != baseline:
            summary[f"{row['precision']}_step_speedup"] = row["step_speedup"]
            summary[f"{row['precision']}_loss_change"] = row["loss_change"]
            summary[f"{row['precision']}_first_loss_change"] = row["first_loss_change"]
        if row["operator"] == "quantise" and row["precision"] != "copy":
            summary[f"{row['precision']}: quantise_of_copy_bandwidth"] = row["of_copy_bandwidth"]
    again = [row for row in rows if AA in row["precision"] and row["pass"] != "forward"]
    ratios = [row.get("step_speedup", row.get(f"speedup_over_{baseline}", 1.0)) for row in again]
    summary["aa_worst"] = max(abs(ratio - 1) for ratio in ratios)
    return summary


def _baseline(device: torch.device) -> str:
    return "fp32" if device.type == "cpu" else "bf16"
