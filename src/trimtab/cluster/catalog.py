"""Known devices: memory and peak rates from their datasheets.

For planning with hardware that is not available. All figures are *estimates*: a datasheet's dense peak, which no
program reaches. Devices that are available are measured instead, and a device that is missing here is no error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal


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


def _gpu(
    model: str,
    pattern: str,
    memory_gib: float,
    gb_per_s: float,
    capability: tuple[int, int] | None,
    **tflops: float,
) -> KnownDevice:
    return KnownDevice(
        model=model,
        kind="cuda",
        pattern=pattern,
        memory_gib=memory_gib,
        gb_per_s=gb_per_s,
        capability=capability,
        tflops=tflops,
    )


def _cpu(model: str, pattern: str, gb_per_s: float, **tflops: float) -> KnownDevice:
    return KnownDevice(model=model, kind="cpu", pattern=pattern, gb_per_s=gb_per_s, tflops=tflops)


CATALOG: tuple[KnownDevice, ...] = (
    _gpu("V100 SXM2 32GB", r"V100.*32GB", 32, 900, (7, 0), fp32=15.7, fp16=125),
    _gpu("V100 SXM2 16GB", r"V100", 16, 900, (7, 0), fp32=15.7, fp16=125),
    _gpu("T4", r"\bT4\b", 16, 320, (7, 5), fp32=8.1, fp16=65, int8=130),
    _gpu("A100 80GB", r"\bA100\b.*80GB", 80, 2039, (8, 0), fp32=19.5, tf32=156, bf16=312, fp16=312, int8=624),
    _gpu("A100 40GB", r"\bA100\b", 40, 1555, (8, 0), fp32=19.5, tf32=156, bf16=312, fp16=312, int8=624),
    _gpu("A10", r"\bA10G?\b", 24, 600, (8, 6), fp32=31.2, tf32=62.5, bf16=125, fp16=125, int8=250),
    _gpu("RTX 3090", r"RTX 3090", 24, 936, (8, 6), fp32=35.6, tf32=35.6, bf16=71, fp16=71, int8=284),
    _gpu(
        "RTX 4090",
        r"RTX 4090",
        24,
        1008,
        (8, 9),
        fp32=82.6,
        tf32=82.6,
        bf16=165.2,
        fp16=165.2,
        fp8=330.3,
        int8=660.6,
    ),
    _gpu("L40S", r"\bL40S\b", 48, 864, (8, 9), fp32=91.6, tf32=183, bf16=362, fp16=362, fp8=733, int8=733),
    _gpu("L4", r"\bL4\b", 24, 300, (8, 9), fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242.5, int8=242.5),
    _gpu(
        "H200 SXM",
        r"\bH200\b",
        141,
        4800,
        (9, 0),
        fp32=67,
        tf32=494.7,
        bf16=989.4,
        fp16=989.4,
        fp8=1978.9,
        int8=1978.9,
    ),
    _gpu(
        "H100 PCIe",
        r"\bH100 PCIe",
        80,
        2000,
        (9, 0),
        fp32=51,
        tf32=378,
        bf16=756,
        fp16=756,
        fp8=1513,
        int8=1513,
    ),
    _gpu(
        "H100 SXM",
        r"\bH100\b",
        80,
        3350,
        (9, 0),
        fp32=67,
        tf32=494.7,
        bf16=989.4,
        fp16=989.4,
        fp8=1978.9,
        int8=1978.9,
    ),
    _gpu(
        "MI300X",
        r"MI300",
        192,
        5300,
        None,
        fp32=163.4,
        tf32=653.7,
        bf16=1307.4,
        fp16=1307.4,
        fp8=2614.9,
        int8=2614.9,
    ),
    # One core, at its sustained clock under vector load. VNNI sums four int8 products per fp32 product.
    _cpu("EPYC 9005 (Zen 5)", r"EPYC 9\d\d5", 576, fp32=0.21, bf16=0.42, int8=0.84),
    _cpu("EPYC 9004 (Zen 4)", r"EPYC 9\d\d4", 460, fp32=0.096, bf16=0.19, int8=0.38),
    _cpu("EPYC 7003 (Zen 3)", r"EPYC 7\w\w3", 205, fp32=0.096),
    _cpu("EPYC 7002 (Zen 2)", r"EPYC 7\w\w2", 205, fp32=0.096),
    _cpu("Ryzen 9000 (Zen 5)", r"Ryzen \d 9\d\d\d", 90, fp32=0.29, bf16=0.58, int8=1.15),
    _cpu("Ryzen 7000 (Zen 4)", r"Ryzen \d 7\d\d\d", 83, fp32=0.14, bf16=0.29, int8=0.58),
    _cpu(
        "Xeon 4th and 5th generation (Sapphire and Emerald Rapids)",
        r"Xeon.*(84|85|64|65)\d\d",
        307,
        fp32=0.16,
        bf16=2.5,
        int8=5.0,
    ),
    _cpu("Xeon 3rd generation (Ice Lake)", r"Xeon.*(83|63)\d\d", 205, fp32=0.16, int8=0.64),
    _cpu("Xeon 2nd generation (Cascade Lake)", r"Xeon.*(82|62|52)\d\d", 141, fp32=0.15, int8=0.6),
    _cpu("Xeon 1st generation (Skylake)", r"Xeon.*(81|61|51)\d\d", 128, fp32=0.15),
    _cpu(
        "Core 12th to 14th generation",
        r"1[234]th Gen Intel.*Core|Core.*i\d-1[234]\d\d\d",
        77,
        fp32=0.14,
        int8=0.56,
    ),
    _cpu("Graviton3 (Neoverse V1)", r"Neoverse-V1|Graviton3", 307, fp32=0.083, bf16=0.33, int8=0.66),
)
"""More specific patterns come first."""
