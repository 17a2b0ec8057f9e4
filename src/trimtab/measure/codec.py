"""Measure the codec: seconds of encoding and decoding as a·n + c, on this device."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from trimtab.cluster.profile import CodecTime, Line
from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import RAW, Packing, Segment
from trimtab.measure.timing import seconds_per_call
from trimtab.predict.linear_fit import fit_line

NUMELS = {"cpu": (1 << 14, 1 << 17, 1 << 20), "cuda": (1 << 14, 1 << 20, 1 << 23)}
EXACT = 1024


class CodecProbe:
    """Times encoding and decoding at a number of bits, in rounds; the fits can be read after any round."""

    def __init__(self, bits: int, device: torch.device, *, block: int = 1024) -> None:
        self._device, self._kernels = device, kernels_for(device)
        self._cases: dict[tuple[str, int], Callable[[], None]] = {}
        self._times: dict[tuple[str, int], list[float]] = {}
        self._numels = NUMELS[device.type]
        for numel in self._numels:
            # A bucket also has small parameters, which are sent exactly.
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
            # Long enough that a CPU quota of short periods counts in full.
            seconds = seconds_per_call(run, self._device, at_least_s=0.015, gpu_calls=8)
            self._times.setdefault(key, []).append(seconds)

    def fits(self) -> dict[str, tuple[float, float]]:
        """(seconds per value, fixed seconds) of `encode`, `decode` and `add` (decode and add to a sum)."""
        return {
            which: fit_line([(numel, median(self._times[which, numel])) for numel in self._numels])
            for which in ("encode", "decode", "add")
        }

    def times(self) -> CodecTime:
        """The fits as a profile stores them."""
        return CodecTime(**{which: Line(a=a, c=c) for which, (a, c) in self.fits().items()})
