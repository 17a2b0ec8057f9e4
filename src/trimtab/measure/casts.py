"""Measure casts between types, named by their direction: ``fp32>int8`` reads fp32 and writes codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

from trimtab.cluster.profile import Line
from trimtab.errors import TrimtabError
from trimtab.measure.timing import seconds_per_call
from trimtab.precision.draw import Draw
from trimtab.precision.half import DTYPES
from trimtab.precision.passes import products_for
from trimtab.predict.linear_fit import fit_line

ROWS = {"cpu": (32, 256, 1024), "cuda": (256, 2048, 16384)}
COLUMNS = 512
REPEATS = 5


def cast_lines(device: torch.device, directions: Sequence[str]) -> dict[str, Line]:
    """Seconds as a·n + c for each direction; quantizing includes finding the scales."""
    lines = {}
    for direction in directions:
        points = []
        for rows in ROWS[device.type]:
            run = cast(direction, rows, device)
            times = [seconds_per_call(run, device, at_least_s=0.003, gpu_calls=16) for _ in range(REPEATS)]
            points.append((rows * COLUMNS, median(times)))
        a, c = fit_line(points)
        lines[direction] = Line(a=a, c=c)
    return lines


def cast(direction: str, rows: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """The cast of a matrix with so many rows, as a function to time."""
    source, _, target = direction.partition(">")
    types = DTYPES
    values = torch.randn(rows, COLUMNS, device=device)
    if target in ("int8", "fp8") and source in types:
        typed = values.to(types[source])
        products = products_for(target, None, None, device.type)
        draw = Draw(1, torch.zeros(1, dtype=torch.int64, device=device), True)
        return lambda: products.input(typed, draw)[0]
    if source == "int8" and target in types:
        codes, scales = values.to(torch.int8), torch.ones(rows, 1, device=device)
        return lambda: (codes * scales).to(types[target])
    if source not in types or target not in types or source == target:
        raise TrimtabError(
            f"{direction!r} is not a cast; write two of {', '.join([*types, 'int8'])} with > between"
        )
    typed = values.to(types[source])
    return lambda: typed.to(types[target])
