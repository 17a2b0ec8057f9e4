"""Measuring the codec: what encoding and decoding take, as a·n + c, on the device at hand."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import torch

from trimtab.cluster.profile import CodecTime, Line
from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import RAW, Packing, Segment

if TYPE_CHECKING:
    from collections.abc import Callable

NUMELS = {"cpu": (1 << 14, 1 << 17, 1 << 20), "cuda": (1 << 14, 1 << 20, 1 << 23)}
EXACT = 1024


class CodecProbe:
    """Trials of encoding and decoding at a number of bits; rounds can be added, and fitted at any time."""

    def __init__(self, bits: int, device: torch.device, *, block: int = 1024) -> None:
        self._device, self._kernels = device, kernels_for(device)
        self._cases: dict[tuple[str, int], Callable[[], None]] = {}
        self._taken: dict[tuple[str, int], list[float]] = {}
        self._numels = NUMELS[device.type]
        for numel in self._numels:
            # A bucket has small parameters too, which travel as they are.
            coded = Segment(offset=0, numel=numel, bits=bits, block=block)
            exact = Segment(offset=numel, numel=EXACT, bits=RAW, block=block)
            packing = Packing(segments=(coded, exact), dtype=torch.float32)
            flat = torch.randn(numel + EXACT, device=device)
            out = torch.zeros(packing.nbytes, dtype=torch.uint8, device=device)
            self._add(numel, packing, flat, out)

    def _add(self, numel: int, packing: Packing, flat: torch.Tensor, out: torch.Tensor) -> None:
        kernels = self._kernels
        self._cases["encode", numel] = lambda: kernels.encode(flat, packing, out, stream=1, scale=0.5)
        self._cases["decode", numel] = lambda: kernels.decode(out, packing, flat)
        self._cases["add", numel] = lambda: kernels.decode(out, packing, flat, add=True)

    def round(self) -> None:
        for key, run in self._cases.items():
            self._taken.setdefault(key, []).append(self._timed(run))

    def fits(self) -> dict[str, tuple[float, float]]:
        """(seconds per value, seconds besides) of `encode`, `decode` and `add` (decode onto a sum)."""
        found = {}
        for which in ("encode", "decode", "add"):
            points = [(numel, median(self._taken[which, numel])) for numel in self._numels]
            found[which] = line(points)
        return found

    def times(self) -> CodecTime:
        """The fits, as a profile holds them."""
        return CodecTime(**{which: Line(a=a, c=c) for which, (a, c) in self.fits().items()})

    def _timed(self, run: Callable[[], None]) -> float:
        if self._device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            run()
            begin.record()
            for _ in range(8):
                run()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 8e3
        # Repeated until a quota of short periods counts in full.
        run()
        times, start = 0, time.perf_counter()
        while (taken := time.perf_counter() - start) < 0.015:
            run()
            times += 1
        return taken / times


def line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(slope, offset) of seconds over size, least squares in relative error; neither is negative."""
    a = sum((n / s) ** 2 for n, s in points)
    b = sum(n / s**2 for n, s in points)
    c = sum(1 / s**2 for _, s in points)
    p = sum(n / s for n, s in points)
    q = sum(1 / s for _, s in points)
    determinant = a * c - b * b
    slope, offset = (p * c - q * b) / determinant, (q * a - p * b) / determinant
    if offset < 0:
        return p / a, 0.0
    if slope < 0:
        return 0.0, q / c
    return slope, offset
