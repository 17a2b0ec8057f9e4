"""Which precisions a device offers for each kind of operator.

This follows from the device's compute capability or instruction sets, never from its name.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from trimtab.errors import TrimtabError
from trimtab.precision.products import DTYPES
from trimtab.precision_names import (
    HALVES,
    NOT_ON_GPUS,
    OPERATOR_PRECISIONS,
    PASSES,
    OperatorKind,
    Precision,
    PrecisionName,
)


@lru_cache
def offers(device: torch.device) -> dict[OperatorKind, tuple[PrecisionName, ...]]:
    """The precisions this device offers, by kind of operator."""
    if device.type == "cuda" and torch.version.hip is not None:
        # AMD's 8-bit float types differ from the ones our kernels write.
        offered: tuple[PrecisionName, ...] = ("fp32", "bf16", "fp16")
    elif device.type == "cuda":
        offered = cuda_precisions(torch.cuda.get_device_capability(device.index))
    else:
        offered = cpu_precisions() if device.type == "cpu" else working_halves(device)
    without = NOT_ON_GPUS if device.type == "cuda" else {}
    return {
        kind: tuple(name for name in names if name in offered and name not in without.get(kind, ()))
        for kind, names in OPERATOR_PRECISIONS.items()
    }


def cuda_precisions(capability: tuple[int, int]) -> tuple[PrecisionName, ...]:
    """The precisions of NVIDIA tensor cores by compute capability; fp32 alone before there were tensor cores."""
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
    """The precisions of this processor. int8 needs instructions whose sums cannot saturate."""
    offered: list[PrecisionName] = ["fp32", "bf16", "fp16"]
    if "vnni" in cpu_features() or "i8mm" in cpu_features():
        offered.append("int8")
    return tuple(offered)


@lru_cache
def cpu_features() -> frozenset[str]:
    """Those of {vnni, bf16, amx, i8mm} that this processor has, according to the operating system."""
    try:
        with open("/proc/cpuinfo") as file:  # noqa: PTH123
            line = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return frozenset()
    flags = set(line.split())
    flags_by_feature = {
        "vnni": {"avx512_vnni", "avx_vnni"},
        "bf16": {"avx512_bf16", "bf16"},
        "amx": {"amx_tile"},
        "i8mm": {"i8mm"},
    }
    return frozenset(name for name, any_of in flags_by_feature.items() if flags & any_of)


def autocasts(kind: str) -> bool:
    """Whether autocast is enabled on a type of device; torch fails to say so of one that has none."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def working_halves(device: torch.device) -> tuple[PrecisionName, ...]:
    """For an unknown type of device: fp32, and the half types in which it computes a small product correctly."""
    offered: list[PrecisionName] = ["fp32"]
    for name in HALVES:
        ones = torch.ones((32, 32), device=device).to(DTYPES[name])
        try:
            correct = bool(((ones @ ones).float() == 32).all())
        except RuntimeError:
            correct = False
        if correct:
            offered.append(name)
    return tuple(offered)


def refuse_unsupported(operator: str, kind: OperatorKind, precision: Precision, device: torch.device) -> None:
    """Raise if the device does not offer a precision; the message lists those it offers."""
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
