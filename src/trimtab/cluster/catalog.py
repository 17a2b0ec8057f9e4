"""Known devices: memory and peak rates from their datasheets.

For planning with hardware that is not available. All figures are *estimates*: a datasheet's dense peak, which no
program reaches. Devices that are available are measured instead, and a device that is missing here is no error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class KnownDevice:
    """A device as described by its datasheet."""

    model: str
    """The maker's name."""

    kind: Literal["cpu", "cuda"]
    """The torch device type (AMD's GPUs are "cuda", too)."""

    pattern: str = field(repr=False)
    """Regular expression for the name that the driver or the operating system reports."""

    tflops: dict[str, float]
    """10¹² operations per second by precision: of the whole GPU, or of one core of a CPU. Precisions that are
    missing are not supported."""

    gb_per_s: float
    """Memory bandwidth in 10⁹ bytes per second: of the GPU, or of the CPU's socket."""

    memory_gib: float | None = None
    """Memory of the GPU; None for a CPU, which has that of its host."""

    capability: tuple[int, int] | None = None
    """NVIDIA's compute capability."""

    estimated: Literal[True] = True
    """Always: nothing here was measured."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions in which products are at least as fast as in fp32."""
        return tuple(self.tflops)


def lookup(name: str) -> KnownDevice | None:
    """The device with this name in the driver or in /proc/cpuinfo; None if it is not listed."""
    return next((d for d in CATALOG if re.search(d.pattern, name, re.IGNORECASE)), None)


_BESIDES = re.compile(r"NVIDIA|GEFORCE|TESLA|AMD|INSTINCT|SXM\d*|PCIE|NVL|HBM\d\w*|\d+GB|X")
"""Words that may stand beside what a device is recognized by."""


def lookup_typed(name: str) -> KnownDevice | None:
    """The device that a person means: ``RTX 3090``, ``rtx3090`` and ``RTX-3090`` are the same."""
    spaced = re.sub(r"[-_\s]+", " ", name).strip()
    for text in (name, spaced.upper(), re.sub(r"(?<=[A-Z])(?=\d)", " ", spaced.upper())):
        device = lookup(text)
        if device is None:
            continue
        if device.kind == "cpu":
            return device
        rest = re.sub(device.pattern, "", text, count=1, flags=re.IGNORECASE)
        if all(_BESIDES.fullmatch(word.upper()) for word in re.findall(r"\w+", rest)):
            return device
    return None


_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")

# fmt: off
_DEVICES: tuple[tuple[Any, ...], ...] = (
    # model, pattern, GiB (None for a CPU), GB/s, capability, and the rate in each of the precisions
    ("V100 SXM2 32GB",      r"V100.*32GB",       32,  900, (7, 0),  15.7,  None,   None,    125,   None,   None),
    ("V100 SXM2 16GB",      r"V100",             16,  900, (7, 0),  15.7,  None,   None,    125,   None,   None),
    ("T4",                  r"\bT4\b",           16,  320, (7, 5),   8.1,  None,   None,     65,   None,    130),
    ("A100 80GB",           r"\bA100\b.*80GB",   80, 2039, (8, 0),  19.5,   156,    312,    312,   None,    624),
    ("A100 40GB",           r"\bA100\b",         40, 1555, (8, 0),  19.5,   156,    312,    312,   None,    624),
    ("A10",                 r"\bA10G?\b",        24,  600, (8, 6),  31.2,  62.5,    125,    125,   None,    250),
    ("RTX 3090",            r"RTX 3090",         24,  936, (8, 6),  35.6,  35.6,     71,     71,   None,    284),
    ("RTX 4090",            r"RTX 4090",         24, 1008, (8, 9),  82.6,  82.6,  165.2,  165.2,  330.3,  660.6),
    ("L40S",                r"\bL40S\b",         48,  864, (8, 9),  91.6,   183,    362,    362,    733,    733),
    ("L4",                  r"\bL4\b",           24,  300, (8, 9),  30.3,    60,    121,    121,  242.5,  242.5),
    ("H200 SXM",            r"\bH200\b",        141, 4800, (9, 0),    67, 494.7,  989.4,  989.4, 1978.9, 1978.9),
    ("H100 PCIe",           r"\bH100 PCIe",      80, 2000, (9, 0),    51,   378,    756,    756,   1513,   1513),
    ("H100 SXM",            r"\bH100\b",         80, 3350, (9, 0),    67, 494.7,  989.4,  989.4, 1978.9, 1978.9),
    ("MI300X",              r"MI300",           192, 5300,   None, 163.4, 653.7, 1307.4, 1307.4, 2614.9, 2614.9),
    # One core, at its sustained clock under vector load. VNNI sums four int8 products per fp32 product.
    ("EPYC 9005 (Zen 5)", r"EPYC 9\d\d5", None, 576, None, 0.21, None, 0.42, None, None, 0.84),
    ("EPYC 9004 (Zen 4)", r"EPYC 9\d\d4", None, 460, None, 0.096, None, 0.19, None, None, 0.38),
    ("EPYC 7003 (Zen 3)", r"EPYC 7\w\w3", None, 205, None, 0.096, None, None, None, None, None),
    ("EPYC 7002 (Zen 2)", r"EPYC 7\w\w2", None, 205, None, 0.096, None, None, None, None, None),
    ("Ryzen 9000 (Zen 5)", r"Ryzen \d 9\d\d\d", None, 90, None, 0.29, None, 0.58, None, None, 1.15),
    ("Ryzen 7000 (Zen 4)", r"Ryzen \d 7\d\d\d", None, 83, None, 0.14, None, 0.29, None, None, 0.58),
    ("Xeon 4th and 5th generation (Sapphire and Emerald Rapids)", r"Xeon.*(84|85|64|65)\d\d",
     None, 307, None, 0.16, None, 2.5, None, None, 5),
    ("Xeon 3rd generation (Ice Lake)", r"Xeon.*(83|63)\d\d", None, 205, None, 0.16, None, None, None, None, 0.64),
    ("Xeon 2nd generation (Cascade Lake)", r"Xeon.*(82|62|52)\d\d",
     None, 141, None, 0.15, None, None, None, None, 0.6),
    ("Xeon 1st generation (Skylake)", r"Xeon.*(81|61|51)\d\d", None, 128, None, 0.15, None, None, None, None, None),
    ("Core 12th to 14th generation", r"1[234]th Gen Intel.*Core|Core.*i\d-1[234]\d\d\d",
     None, 77, None, 0.14, None, None, None, None, 0.56),
    ("Graviton3 (Neoverse V1)", r"Neoverse-V1|Graviton3", None, 307, None, 0.083, None, 0.33, None, None, 0.66),
)
# fmt: on

CATALOG = tuple(
    KnownDevice(
        model=model,
        kind="cpu" if gib is None else "cuda",
        pattern=pattern,
        tflops={name: rate for name, rate in zip(_PRECISIONS, rates, strict=True) if rate is not None},
        gb_per_s=gb_per_s,
        memory_gib=gib,
        capability=capability,
    )
    for model, pattern, gib, gb_per_s, capability, *rates in _DEVICES
)
"""More specific patterns come first."""
