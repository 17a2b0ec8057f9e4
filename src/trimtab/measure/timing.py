"""How everything here is timed: one call or many, on one rank or on all of them in lockstep."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median
from typing import NamedTuple

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


class StepTimes(NamedTuple):
    """Seconds of one step, by operator."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    optimizer: float
    """0 where the optimizer was left out."""

    @property
    def passes(self) -> float:
        return sum(self.forward) + sum(self.backward)

    @property
    def total(self) -> float:
        return self.passes + self.optimizer

    def scaled(self, factor: float) -> StepTimes:
        """The same with other passes."""
        return self._replace(
            forward=tuple(factor * seconds for seconds in self.forward),
            backward=tuple(factor * seconds for seconds in self.backward),
        )


Timed = tuple[int, Mapping[str, str], Sequence[StepTimes]]
"""Samples, precisions by operator name, and the steps that were timed with them."""


def anchored(step: StepTimes, whole: StepTimes) -> StepTimes:
    """A step timed per operator, scaled to the same step timed as a whole.

    Timing an operator costs the host some time, which is in every interval where the device waits for its host.
    """
    forward = sum(whole.forward) / sum(step.forward)
    backward = sum(whole.backward) / sum(step.backward)
    return StepTimes(
        forward=tuple(seconds * forward for seconds in step.forward),
        backward=tuple(seconds * backward for seconds in step.backward),
        optimizer=whole.optimizer,
    )


def never_falling(timed: Sequence[Timed]) -> list[Timed]:
    """The steps, scaled where one with more samples took less time in the same precisions.

    On a busy machine, or with a model so small that it waits for its host, noise is larger than what a sample costs.
    A plan made of such times would give the slowest rank most samples, because they make it faster. Passes of
    neighboring sizes that are in the wrong order get their mean.
    """
    of_precisions: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for place, (_, precisions, _) in enumerate(timed):
        of_precisions.setdefault(tuple(sorted(precisions.items())), []).append(place)
    scaled = list(timed)
    for places in of_precisions.values():
        pooled: list[tuple[float, list[int]]] = []  # mean seconds of the passes of some sizes
        taken = {place: median(step.passes for step in timed[place][2]) for place in places}
        for place in sorted(places, key=lambda place: timed[place][0]):
            pooled.append((taken[place], [place]))
            while len(pooled) > 1 and pooled[-2][0] > pooled[-1][0]:
                together = pooled[-2][1] + pooled.pop()[1]
                pooled[-1] = mean(taken[each] for each in together), together
        for seconds, together in pooled:
            for place in together:
                if taken[place] and len(together) > 1:
                    samples, precisions, steps = timed[place]
                    scaled[place] = (
                        samples,
                        precisions,
                        [step.scaled(seconds / taken[place]) for step in steps],
                    )
    return scaled
