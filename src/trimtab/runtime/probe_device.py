"""Measuring one device: a model's operators in each precision and batch size, casts, codec, launches, optimiser."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.cluster.profile import DeviceProfile, Line
from trimtab.emulate.job import MARK
from trimtab.errors import TrimtabError
from trimtab.precision.devices import offers
from trimtab.predict.settings import matched
from trimtab.runtime.probe_cache import ProbeCache
from trimtab.runtime.probe_casts import cast_lines
from trimtab.runtime.probe_codec import CodecProbe
from trimtab.runtime.probe_steps import (
    StepClock,
    StepTimes,
    anchored,
    host_ahead,
    operator_times,
    without_communication,
)
from trimtab.runtime.set_precision import set_precision
from trimtab.workload.capture import capture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trimtab.runtime.model_spec import ModelSpec
    from trimtab.workload import Workload

WARMUP, STEPS = 2, 5


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to measure."""

    spec: ModelSpec
    batches: tuple[int, ...]
    precisions: tuple[str, ...]
    """Beside what the model computes in by itself."""

    bits: tuple[int, ...]
    autocast: str | None = None
    seconds: float = 120.0
    """No new unit of work is begun after this time."""


def called(device: torch.device) -> str:
    """What the driver or the operating system calls a device."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        with open("/proc/cpuinfo") as file:  # noqa: PTH123
            line = next((line for line in file if line.startswith("model name")), "")
    except OSError:
        line = ""
    return line.partition(":")[2].strip() or "cpu"


class DeviceProbe:
    """Measures in units, each kept as soon as it is done; what was kept before is not measured again."""

    def __init__(self, task: Task, device: torch.device, cache: ProbeCache) -> None:
        self._task, self._device, self._cache = task, device, cache
        self.workload: Workload = capture(
            task.spec.model, task.spec.batch, loss=task.spec.loss, autocast=task.autocast
        )
        _refuse_unoffered(task.precisions, device)
        self._trainer: tuple[DistributedDataParallel, torch.optim.Optimizer] | None = None

    def run(self, progress: Callable[[int, int], None]) -> tuple[DeviceProfile, list[str]]:
        """The profile, and the names of units that there was no time for."""
        units = list(self._units())
        start = time.perf_counter()
        left = []
        for index, (name, measure) in enumerate(units):
            if name in self._cache.done:
                continue
            if time.perf_counter() - start > self._task.seconds:
                left.append(name)
                continue
            self._cache.add(name, measure(self._cache.profile))
            progress(index + 1, len(units))
        set_precision(self._task.spec.model, {})
        return self._cache.profile, left

    def _units(self) -> Iterator[tuple[str, Callable[[DeviceProfile], DeviceProfile]]]:
        mark = fingerprint(self.workload)
        for batch in self._task.batches:
            for precision in (None, *self._task.precisions):
                yield f"steps {mark} batch {batch} {precision or 'plain'}", self._steps(batch, precision)
        plain = self._task.autocast or "fp32"
        directions = [
            f"{source}>{p}" for p in self._task.precisions for source in dict.fromkeys((plain, "fp32"))
        ]
        directions += [f"{p}>{plain}" for p in self._task.precisions if p not in ("fp8", "tf32")]
        for direction in dict.fromkeys(
            d for d in directions if len(set(d.split(">"))) == 2 and "tf32" not in d
        ):
            yield f"cast {direction}", self._cast(direction)
        for bits in self._task.bits:
            yield f"codec {bits}", self._codec(bits)
        yield "launch", self._launch

    def _steps(self, batch: int, precision: str | None) -> Callable[[DeviceProfile], DeviceProfile]:
        def measure(profile: DeviceProfile) -> DeviceProfile:
            workload = self.workload.at_batch(batch)
            settable = dict.fromkeys(matched(workload, {"*": precision}), precision) if precision else {}
            steps = [self._step(batch, settable) for _ in range(WARMUP + STEPS)][WARMUP:]
            elements = sum(p.tensor.numel for p in workload.parameters if p.trainable)
            # What nobody set was timed in plain steps, which came first.
            operators = {**operator_times(workload, steps, settable), **profile.operators}
            sizes = {*profile.batches.get(workload.model, ()), batch}
            return replace(
                profile,
                operators=operators,
                batches={**profile.batches, workload.model: tuple(sorted(sizes))},
                optimiser=Line(a=median(s.optimiser for s in steps) / elements, c=0.0),
            )

        return measure

    def _step(self, batch: int, precisions: dict[str, str]) -> StepTimes:
        if self._trainer is None:
            ddp = DistributedDataParallel(self._task.spec.model)
            without_communication(ddp)
            self._trainer = ddp, torch.optim.AdamW(self._task.spec.model.parameters(), lr=1e-6)
        ddp, optimiser = self._trainer
        set_precision(ddp, precisions)
        arguments = self._task.spec.batch_of(batch)
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}

        def loss() -> torch.Tensor:
            kind = self._task.autocast
            with torch.autocast(self._device.type, half[kind]) if kind else nullcontext():
                return self._task.spec.loss_of(ddp(*arguments))

        def update() -> None:
            optimiser.step()
            optimiser.zero_grad()

        clock = StepClock(self._task.spec.model, self.workload, self._device)

        def ready() -> None:
            host_ahead(self._device)

        step = clock.step(loss, update, ready=ready)
        if self._device.type == "cpu":
            return step  # reading a clock costs nothing beside an operator
        return anchored(step, clock.step(loss, update, ready=ready, whole=True))

    def _cast(self, direction: str) -> Callable[[DeviceProfile], DeviceProfile]:
        return lambda profile: replace(
            profile, casts={**profile.casts, **cast_lines(self._device, (direction,))}
        )

    def _codec(self, bits: int) -> Callable[[DeviceProfile], DeviceProfile]:
        def measure(profile: DeviceProfile) -> DeviceProfile:
            probe = CodecProbe(bits, self._device)
            for _ in range(3):
                probe.round()
            return replace(profile, codec={**profile.codec, str(bits): probe.times()})

        return measure

    def _launch(self, profile: DeviceProfile) -> DeviceProfile:
        return replace(profile, launch_s=launch_seconds(self._device))


def launch_seconds(device: torch.device) -> float:
    """What the host takes to start a small kernel; on a CPU there is nothing to start."""
    if device.type == "cpu":
        return 0.0
    x = torch.zeros(16, device=device)
    taken = []
    for _ in range(5):
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        for _ in range(200):
            x.add_(1.0)
        taken.append((time.perf_counter() - start) / 200)
    return median(taken)


def fingerprint(workload: Workload) -> str:
    """Short, and the same for models whose operators have the same shapes."""
    from trimtab.predict.costs import key_of

    text = ";".join(str(key_of(operator)) for operator in workload.at_batch(1).operators)
    return f"{workload.model}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def conditions(device: torch.device) -> str:
    """What a device's times depend on beside its name: threads, or the share of a GPU."""
    if device.type == "cpu":
        return f"{torch.get_num_threads()}-threads"
    return f"share-{os.environ.get('CUDA_MPS_ACTIVE_THREAD_PERCENTAGE', '100')}"


def cache_of(device: torch.device, extra: str = "") -> ProbeCache:
    """Where measurements of this device are kept."""
    where = conditions(device) + (f"-{extra}" if extra else "")
    return ProbeCache(
        called(device),
        where,
        torch=torch.__version__,
        trimtab=trimtab.__version__,
        keep=MARK not in os.environ,
    )


def alone() -> bool:
    """Make a group of one rank where there is none, for DDP; whether it was made."""
    if dist.is_initialized():
        return False
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return True


def _refuse_unoffered(precisions: Sequence[str], device: torch.device) -> None:
    offered = offers(device)["linear"]
    for name in precisions:
        if name not in offered:
            raise TrimtabError(f"{called(device)} does not offer {name}; it offers {', '.join(offered)}")
