"""Measure kernels beside the operators: casts between types and the codec as a·n + c seconds, and launching one.

Casts are named by their direction: ``fp32>int8`` reads fp32 and writes codes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from trimtab.cluster.profile import CodecTime, Line
from trimtab.codec import ErrorFeedback
from trimtab.codec.kernels import kernels_for
from trimtab.codec.packing import RAW, Packing, Segment
from trimtab.errors import TrimtabError
from trimtab.measure.timing import seconds_per_call, synchronize
from trimtab.precision.draw import Draw
from trimtab.precision.linear import products_for
from trimtab.precision.products import DTYPES
from trimtab.predict.linear_fit import fit_line

ROWS = {"cpu": (32, 256, 1024), "cuda": (256, 2048, 16384)}
COLUMNS = 512
NUMELS = {"cpu": (1 << 14, 1 << 17, 1 << 20), "cuda": (1 << 14, 1 << 20, 1 << 23)}
EXACT = 1024
"""A bucket also has small parameters, which are sent exactly."""


def cast_lines(device: torch.device, directions: Sequence[str]) -> dict[str, Line]:
    """The time of each direction; quantizing includes finding the scales."""
    lines = {}
    for direction in directions:
        points = []
        for rows in ROWS[device.type]:
            run = cast(direction, rows, device)
            times = [seconds_per_call(run, device, at_least_s=0.003, gpu_calls=16) for _ in range(5)]
            points.append((rows * COLUMNS, median(times)))
        lines[direction] = _line(points)
    return lines


def cast(direction: str, rows: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """The cast of a matrix with so many rows, as a function to time."""
    source, _, target = direction.partition(">")
    values = torch.randn(rows, COLUMNS, dtype=torch.float32, device=device)
    if target in ("int8", "fp8") and source in DTYPES:
        typed = values.to(DTYPES[source])
        products = products_for(target, None, None, device.type)
        draw = Draw(1, torch.zeros(1, dtype=torch.int64, device=device), True)
        return lambda: products.input(typed, draw)[0]
    if source == "int8" and target in DTYPES:
        codes, scales = values.to(torch.int8), torch.ones(rows, 1, dtype=torch.float32, device=device)
        return lambda: (codes * scales).to(DTYPES[target])
    if source not in DTYPES or target not in DTYPES or source == target:
        raise TrimtabError(
            f"{direction!r} is not a cast; write two of {', '.join([*DTYPES, 'int8'])} with > between"
        )
    typed = values.to(DTYPES[source])
    return lambda: typed.to(DTYPES[target])


def codec_times(
    bits: int, device: torch.device, *, block: int = 1024, rounds: int = 3, feedback: bool = True
) -> CodecTime:
    """The codec's times at a number of bits: medians over rounds of all its operations."""
    kernels, numels = kernels_for(device), NUMELS[device.type]
    cases: dict[tuple[str, int], Callable[[], None]] = {}
    for numel in numels:
        coded = Segment(offset=0, numel=numel, bits=bits, block=block)
        exact = Segment(offset=numel, numel=EXACT, bits=RAW, block=1024)
        packing = Packing(segments=(coded, exact), dtype=torch.float32)
        flat = torch.randn(numel + EXACT, dtype=torch.float32, device=device)
        out = torch.zeros(packing.nbytes, dtype=torch.uint8, device=device)
        cases["encode", numel] = partial(kernels.encode, flat, packing, out, stream=1, scale=0.5)
        cases["decode", numel] = partial(kernels.decode, out, packing, flat)
        cases["add", numel] = partial(kernels.decode, out, packing, flat, add=True)
        if feedback:
            cases["feedback", numel] = partial(_feed_back, ErrorFeedback(), torch.zeros_like(flat))
    times = defaultdict(list)
    for _ in range(rounds):
        for key, run in cases.items():
            # Long enough that a CPU quota of short periods counts in full.
            times[key].append(seconds_per_call(run, device, at_least_s=0.015, gpu_calls=8))
    lines = {
        which: _line([(numel, median(times[which, numel])) for numel in numels])
        for which in dict.fromkeys(which for which, _ in cases)
    }
    return CodecTime(**lines)


def _feed_back(feedback: ErrorFeedback, values: torch.Tensor) -> None:
    """What error feedback does to a bucket beside encoding and decoding it."""
    feedback.restore("", values)
    feedback.keep("", values.clone(), values)


def launch_seconds(device: torch.device) -> float:
    """Seconds for the host to launch a small kernel; 0 on a CPU."""
    if device.type == "cpu":
        return 0.0
    x = torch.zeros(16, device=device)
    taken = []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(200):
            x.add_(1.0)
        taken.append((time.perf_counter() - start) / 200)
    return median(taken)


def _line(points: Sequence[tuple[int, float]]) -> Line:
    a, c = fit_line(points)
    return Line(a=a, c=c)
