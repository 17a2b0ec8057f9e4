"""Which precisions a device offers for each kind of operator, and how fast each one is here.

What a device offers follows from the device itself (compute capability, instruction sets), never from its
name. How fast it is follows from measuring: `measure` times each offered precision against fp32.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING

import torch

from trimtab.errors import TrimtabError
from trimtab.precision_names import OPERATOR_PRECISIONS, PASSES, Precision, PrecisionName

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trimtab.precision_names import OperatorKind


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Forward and backward of a linear layer on this device, in one precision."""

    precision: PrecisionName
    ms: float
    speedup_over_fp32: float

    @property
    def slower_than_fp32(self) -> bool:
        return self.speedup_over_fp32 < 1


def offers(device: torch.device) -> dict[OperatorKind, tuple[PrecisionName, ...]]:
    """The precisions this device offers, by kind of operator."""
    return _offers(device.type, device.index)


@lru_cache
def _offers(device_type: str, index: int | None) -> dict[OperatorKind, tuple[PrecisionName, ...]]:
    if device_type == "cuda":
        if torch.version.hip is not None:
            # Their 8-bit float types are others than the ones our kernels write.
            offered: tuple[PrecisionName, ...] = ("fp32", "bf16", "fp16")
        else:
            offered = cuda_precisions(torch.cuda.get_device_capability(index))
    elif device_type == "cpu":
        offered = cpu_precisions()
    else:
        offered = working_halves(torch.device(device_type if index is None else f"{device_type}:{index}"))
    return {
        kind: tuple(name for name in names if name in offered) for kind, names in OPERATOR_PRECISIONS.items()
    }


def cuda_precisions(capability: tuple[int, int]) -> tuple[PrecisionName, ...]:
    """What tensor cores of an NVIDIA compute capability multiply; fp32 before there were any."""
    offered: list[PrecisionName] = ["fp32"]
    if capability >= (7, 0):
        offered.append("fp16")
    if capability >= (7, 5):
        offered.append("int8")
    if capability >= (8, 0):
        offered += ["tf32", "bf16"]
    if capability >= (8, 9):
        offered.append("fp8")
    return tuple(offered)


def cpu_precisions() -> tuple[PrecisionName, ...]:
    """What this processor multiplies correctly: int8 only with instructions whose sums cannot saturate."""
    offered: list[PrecisionName] = ["fp32", "bf16", "fp16"]
    if "vnni" in cpu_features() or "i8mm" in cpu_features():
        offered.append("int8")
    return tuple(offered)


@lru_cache
def cpu_features() -> frozenset[str]:
    """Those of {vnni, bf16, amx, i8mm} that this processor has, as the operating system tells."""
    try:
        with open("/proc/cpuinfo") as file:  # noqa: PTH123
            line = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return frozenset()
    flags = set(line.split())
    signs = {
        "vnni": {"avx512_vnni", "avx_vnni"},
        "bf16": {"avx512_bf16", "bf16"},
        "amx": {"amx_tile"},
        "i8mm": {"i8mm"},
    }
    return frozenset(name for name, any_of in signs.items() if flags & any_of)


def working_halves(device: torch.device) -> tuple[PrecisionName, ...]:
    """On a device nothing is known of: fp32, and those half types in which a small product comes out right."""
    offered: list[PrecisionName] = ["fp32"]
    halves: tuple[tuple[PrecisionName, torch.dtype], ...] = (
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
    )
    for name, dtype in halves:
        ones = torch.ones((32, 32), device=device)
        try:
            right = bool(((ones.to(dtype) @ ones.to(dtype)).float() == 32).all())
        except RuntimeError:
            right = False
        if right:
            offered.append(name)
    return tuple(offered)


def refuse_unsupported(operator: str, kind: OperatorKind, precision: Precision, device: torch.device) -> None:
    """Raise, with the list of what the device offers, if it lacks what is asked."""
    offered = offers(device)[kind]
    for which, name in zip(PASSES, precision.names, strict=True):
        if name not in offered:
            raise TrimtabError(
                f"{operator}: {_described(device)} does not offer {name} for {which} of this {kind}; "
                f"it offers {', '.join(offered)}"
            )
    if kind in ("attention", "embedding") and len(set(precision.names)) > 1:
        raise TrimtabError(
            f"{operator}: {kind} has one precision for all its passes; got {precision}. "
            f"Write one of {', '.join(offered)}"
        )


def _described(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    if device.type == "cpu":
        return f"this CPU ({', '.join(sorted(cpu_features())) or 'no low-precision instructions'})"
    return str(device)


def measure(
    device: torch.device,
    names: Iterable[PrecisionName] | None = None,
    *,
    shape: tuple[int, int, int] = (256, 512, 512),
    repeats: int = 5,
) -> list[Measured]:
    """Time a linear layer, forward and backward, in each precision: rows × inputs × outputs of `shape`.

    The rounds interleave, and speed-ups are medians of ratios within a round.
    """
    from trimtab.precision.linear import linear

    chosen = tuple(names) if names is not None else offers(device)["linear"]
    chosen = ("fp32", *(name for name in chosen if name != "fp32"))
    rows, inputs, outputs = shape
    calls = torch.zeros(1, dtype=torch.int64, device=device)
    x = torch.randn(rows, inputs, device=device, requires_grad=True)
    weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).requires_grad_()
    g = torch.randn(rows, outputs, device=device)

    def once(name: PrecisionName) -> float:
        _wait(device)
        start = time.perf_counter()
        torch.autograd.grad(linear(x, weight, None, Precision.of(name), base=0, calls=calls), (x, weight), g)
        _wait(device)
        return time.perf_counter() - start

    samples: dict[PrecisionName, list[float]] = {name: [] for name in chosen}
    for round_ in range(2 + repeats):
        for name in chosen:
            taken = once(name)
            if round_ >= 2:
                samples[name].append(taken)
    return [
        Measured(
            precision=name,
            ms=median(taken) * 1e3,
            speedup_over_fp32=median(a / b for a, b in zip(samples["fp32"], taken, strict=True)),
        )
        for name, taken in samples.items()
    ]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
