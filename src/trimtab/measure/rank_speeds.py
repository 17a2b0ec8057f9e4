"""Measure the speed and free memory of tensor-parallel ranks, all at the same time."""

from __future__ import annotations

import torch
import torch.distributed as dist

from trimtab.measure.timing import lockstep_seconds
from trimtab.sharding.group import TensorGroup

_SIZE = {"cpu": (128, 1024), "cuda": (4096, 4096)}
"""Rows and width of the measured matrix product, enough to fill the device."""
_PRODUCTS = 4
_SAMPLES = 40
_WARMUP = 2
_MEMORY_FOR_UNITS = 0.5
"""Fraction of a device's free memory that units may take; activations and replicated parameters need the rest."""


def measure_rank_speeds(
    group: TensorGroup, device: torch.device, dtype: torch.dtype
) -> tuple[list[float], list[float | None]]:
    """Matrix products per second and bytes of memory for units (None: no limit) of every rank. Collective."""
    rows, width = _SIZE.get(device.type, _SIZE["cuda"])
    x = torch.ones(rows, width, device=device, dtype=dtype)
    weight = torch.ones(width, width, device=device, dtype=dtype)

    def products() -> None:
        for _ in range(_PRODUCTS):
            x @ weight

    times = [lockstep_seconds(products, device, group.process_group) for _ in range(_WARMUP + _SAMPLES)]
    # The 20th percentile, over a second or two: a burst of other work must not count as slow hardware.
    typical = sorted(times[_WARMUP:])[_SAMPLES // 5]
    free = torch.cuda.mem_get_info(device)[0] * _MEMORY_FOR_UNITS if device.type == "cuda" else -1.0
    own = torch.tensor([1 / typical, free], dtype=torch.float64, device=device)
    by_rank = [torch.empty_like(own) for _ in range(group.size)]
    dist.all_gather(by_rank, own, group=group.process_group)
    return [float(speed) for speed, _ in by_rank], [None if m < 0 else float(m) for _, m in by_rank]
