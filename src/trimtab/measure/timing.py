"""How everything here is timed: one call or many, on one rank or on all of them in lockstep."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def meet(device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Wait until every rank is here and its device is idle. Collective."""
    synchronize(device)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        synchronize(device)


def lockstep_seconds(
    run: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    """Seconds of one call on this rank, while all ranks make it at the same time. Collective."""
    meet(device, group)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def slowest_seconds(
    run: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    """Seconds of one call until the slowest rank has finished it; the same number on every rank. Collective."""
    seconds = torch.tensor([lockstep_seconds(run, device, group)], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    return float(seconds)


def repeated_seconds(
    run: Callable[[], object],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    repeats: int,
    statistic: Callable[[Sequence[float]], float] = median,
) -> float:
    """The median (or another statistic) of `slowest_seconds`, after one call that is not counted. Collective."""
    # The first call opens connections and fills caches.
    return statistic([slowest_seconds(run, device, group) for _ in range(repeats + 1)][1:])


def seconds_per_call(
    run: Callable[[], object], device: torch.device, *, at_least_s: float, gpu_calls: int, warmup: int = 1
) -> float:
    """Mean seconds of a call: of `gpu_calls` queued calls on a GPU, of `at_least_s` seconds on a CPU."""
    for _ in range(warmup):
        run()
    if device.type == "cuda":
        return stream_seconds(run, gpu_calls) / gpu_calls
    calls, start = 0, time.perf_counter()
    while True:  # at least once: a throttled rank may lose all of the time before its first call
        run()
        calls += 1
        if (elapsed := time.perf_counter() - start) >= at_least_s:
            return elapsed / calls


def call_seconds(run: Callable[[], object], device: torch.device, *, gpu_calls: int = 1) -> float:
    """Seconds of one call; on a GPU the mean of so many queued ones."""
    synchronize(device)
    if device.type == "cuda":
        return stream_seconds(run, gpu_calls) / gpu_calls
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def stream_seconds(run: Callable[[], object], calls: int) -> float:
    """Seconds that so many calls take on the current CUDA stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
