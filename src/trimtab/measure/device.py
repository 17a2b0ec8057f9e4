"""Measure a job's devices on all ranks at once: operators in each precision and batch size, casts, codec.

Every rank makes the same calls in the same order, whatever its cache contains: the ranks agree on what to measure
and on when the time is up.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import trimtab
from trimtab.cluster.profile import CodecTime, DeviceProfile
from trimtab.environment import EMULATION, logger
from trimtab.errors import TrimtabError
from trimtab.measure.cache import ProbeCache
from trimtab.measure.capture.capture import capture_or_run
from trimtab.measure.kernels import cast_lines, codec_times, launch_seconds
from trimtab.measure.operators import StepTrainer, with_steps
from trimtab.measure.out_of_memory import Agreement, OutOfMemoryOnRanksError
from trimtab.measure.timing import Timed
from trimtab.models.spec import ModelSpec
from trimtab.precision.devices import offers
from trimtab.precision_names import PRECISIONS
from trimtab.predict.operators.costs import workload_key
from trimtab.predict.precision_patterns import matched
from trimtab.wire_format import ADAPTIVE_BITS, ADAPTIVE_BLOCK
from trimtab.workload import Workload

WARMUP, ROUNDS, CODEC_ROUNDS = 1, 4, 3
"""Untimed and timed rounds of steps; each round has every precision at every batch size once."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to measure."""

    spec: ModelSpec
    batches: tuple[int, ...]
    precisions: tuple[str, ...]
    """Besides the model's own precision."""

    bits: tuple[int, ...]
    autocast: str | None = None
    seconds: float = 120.0
    """No new unit of work is started after this time."""

    quick: bool = False
    """One round, in the model's own precision first, and short transfers: a job is waiting."""

    @property
    def rounds(self) -> int:
        """Timed rounds of steps."""
        return 1 if self.quick else ROUNDS

    @property
    def codec_rounds(self) -> int:
        """Timed rounds of the codec's operations."""
        return 1 if self.quick else CODEC_ROUNDS


def called(device: torch.device) -> str:
    """The device's name according to the driver or the operating system."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        with open("/proc/cpuinfo") as file:  # noqa: PTH123
            line = next((line for line in file if line.startswith("model name")), "")
    except OSError:
        line = ""
    return line.partition(":")[2].strip() or "cpu"


@dataclass(frozen=True)
class Cell:
    """One step of a rank in every round."""

    samples: int
    precision: str | None
    unit: str
    """The name under which its times are cached."""


def samples_at(sizes: Sequence[int], place: int, rank: int) -> int:
    """The batch size of a rank at a place of the round: odd ranks use the sizes in reverse order.

    So when one of two neighbors has a small share of the batch, the other has a large one, as under a plan,
    and what they share is about equally busy all the time.
    """
    return sizes[place if rank % 2 == 0 else -1 - place]


def smaller_batches(sizes: Sequence[int], too_large: int) -> tuple[int, ...]:
    """The sizes below one that did not fit, and halves of the smallest until there are two; empty after one sample."""
    kept = sorted(size for size in sizes if size < too_large)
    while len(kept) < 2 and (half := min([*kept, too_large]) // 2):
        kept.insert(0, half)
    return tuple(kept)


class DeviceProbe:
    """Measures in units, which are cached; what all ranks have cached is not measured again.

    Steps are run in rounds, so that a machine that is slow for a while slows all kinds of steps, and medians over
    rounds ignore rare delays.
    """

    def __init__(self, task: Task, device: torch.device, cache: ProbeCache) -> None:
        """Collective."""
        self._task, self._device, self._cache = task, device, cache
        self._agreement = Agreement(device)
        with self._agreement.attempt():
            options = {"autocast": task.autocast, "sizes": task.batches}
            # The ranks of a running job have one model: where it waits, the others need not capture it, too.
            first = not task.quick or dist.get_rank() == 0
            captured: Any = capture_or_run(task.spec, **options) if first else None
            offered = offers(device)["linear"]
            for name in task.precisions:
                if name not in offered:
                    raise TrimtabError(
                        f"{called(device)} does not offer {name}; it offers {', '.join(offered)}"
                    )
        self.workload: Workload
        self.workload, self._depends_on_values = _first(captured, device) if task.quick else captured
        self._mark = workload_key(self.workload)
        self._start = 0.0
        self._too_large: int | None = None
        self._done, self._total = 0, 0
        self._progress: Callable[[int, int], None] = lambda done, total: None

    def run(self, progress: Callable[[int, int], None]) -> tuple[DeviceProfile, list[str]]:
        """This rank's profile, and the names of units without enough time. Collective.

        A unit of steps with too few rounds is in the profile, and also among those names. If a batch does not fit
        on some rank, all ranks measure smaller ones instead.
        """
        self._progress = progress
        while True:
            try:
                profile, left = self._run()
                break
            except OutOfMemoryOnRanksError as error:
                samples = error.samples
            # The error is gone by now, and the tensors of the failed step with it.
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self._step_down(samples)
        if self._too_large is not None:
            profile = replace(profile, too_large={**profile.too_large, self._mark: self._too_large})
        return profile, left

    def _step_down(self, samples: dict[int, int]) -> None:
        """Continue with smaller batches, on all ranks, after these did not fit on some."""
        rank, too_large = min(samples.items(), key=lambda item: item[1])
        self._too_large = samples.get(dist.get_rank(), self._too_large)
        batches = smaller_batches(self._task.batches, too_large)
        ranks = f"rank {rank}" if len(samples) == 1 else f"ranks {', '.join(map(str, samples))}"
        if not batches:
            raise TrimtabError(
                f"probe: {ranks} ran out of memory with a batch of one sample; use a smaller model, a device with more "
                "memory, or fewer ranks per device"
            )
        if dist.get_rank() == 0:
            logger().warning(
                "probe: %s ran out of memory with a batch of %d; measuring %s instead%s",
                ranks,
                too_large,
                ", ".join(map(str, batches)),
                "" if len(batches) > 1 else ": times of larger batches cannot be predicted from one size",
            )
        self._task = replace(self._task, batches=batches)

    def _run(self) -> tuple[DeviceProfile, list[str]]:
        cells = self._cells()
        units = self._units()
        counts = [self._cached_rounds(cell) for cell in cells]
        settings: tuple[Any, ...] = (self._mark, self._task.batches, self._task.bits)
        missing = [name for name in units if name not in self._cache.done]
        by_rank = _gather((settings, counts, missing))
        first = by_rank[0][0]
        for rank, (theirs, _, _) in enumerate(by_rank):
            if theirs != first:
                raise TrimtabError(
                    f"probe: rank {rank} probes {theirs[0]} at batches {list(theirs[1])} and {list(theirs[2])} bits, "
                    f"rank 0 {first[0]} at {list(first[1])} and {list(first[2])} bits; use the same on every rank"
                )
        # If one rank lacks something, all of them measure it.
        counts = [min(column) for column in zip(*(own for _, own, _ in by_rank), strict=True)]
        missing = list(dict.fromkeys(name for _, _, names in by_rank for name in names))
        self._done = 0
        rounds = self._task.rounds
        self._total = len(missing) + sum(WARMUP + rounds - count for count in counts if count < rounds)
        self._start = self._start or time.perf_counter()
        left = self._others(units, missing)
        return self._steps(cells, counts, left)

    def _others(
        self, units: dict[str, Callable[[DeviceProfile], DeviceProfile]], missing: Sequence[str]
    ) -> list[str]:
        """Everything but steps: it is short and comes first, so that there is time for it."""
        left = []
        for name in missing:
            mine = name in units and name not in self._cache.done
            if self._time_is_up():
                left += [name] if mine else []
                continue
            with self._agreement.attempt():
                if mine:
                    self._cache.add(name, units[name](self._cache.profile))
            self._advance()
        return left

    def _steps(
        self, cells: Sequence[Cell], counts: Sequence[int], left: list[str]
    ) -> tuple[DeviceProfile, list[str]]:
        pending = [
            (cell, count) for cell, count in zip(cells, counts, strict=True) if count < self._task.rounds
        ]
        finished = not pending or self._rounds(pending)
        timed: dict[str, Timed] = {}
        for cell, _ in pending:
            if not finished and cell.unit in self._cache.done:
                continue  # other ranks lack it; the complete measurement here is better than a partial one
            if not finished and cell.unit not in left:
                left.append(cell.unit)
            if steps := self._cache.steps.get(cell.unit):
                timed[cell.unit] = cell.samples, self._chosen(cell.precision), steps
        profile = self._cache.profile
        if timed:
            profile = with_steps(profile, self.workload, list(timed.values()), self._device.type)
        if finished:
            for unit in timed:
                self._cache.add(unit, profile)
        return profile, left

    def _rounds(self, pending: Sequence[tuple[Cell, int]]) -> bool:
        """Time the pending steps in rounds; returns whether there was time for all of them."""
        spec = self._task.spec
        trainer = StepTrainer(
            spec.model,
            self.workload,
            self._device,
            batch_of=spec.batch_of,
            loss_of=spec.loss_of,
            autocast=self._task.autocast,
            find_unused_parameters=self._depends_on_values or self.workload.leaves_parameters_out(),
        )
        try:
            if self._task.quick:  # one short step allocates gradients and the optimizer's state
                trainer.timed(min(self._task.batches), {})
            for round_ in range(0 if self._task.quick else -WARMUP, self._task.rounds):
                for cell, count in pending:
                    if 0 <= round_ < count:
                        continue
                    needed = self._task.quick and cell.precision is None  # without it there is no plan at all
                    if self._time_is_up() and not needed:
                        return False
                    # Two updates of the optimizer are enough where a job is waiting.
                    update = not self._task.quick or cell.precision is None
                    step = trainer.timed(cell.samples, self._chosen(cell.precision), update=update)
                    if round_ >= 0:
                        self._cache.steps.setdefault(cell.unit, []).append(step)
                    self._advance()
                self._cache.save()
        finally:
            self._cache.save()
            trainer.close()
        return True

    def _cells(self) -> list[Cell]:
        """One round. Steps in the model's own precision come last; a rank with fewer precisions has more of them."""
        own = list(self._task.precisions) if self.workload.settings else []
        most = max(_gather(len(own)))
        chosen: list[str | None] = [*own, *[None] * (most - len(own)), None]
        if self._task.quick:  # what is needed most comes first
            chosen.insert(0, chosen.pop())
        rank, sizes = dist.get_rank(), self._task.batches
        return [
            Cell(samples, precision, f"steps {self._mark} batch {samples} {precision or 'plain'}")
            for precision in chosen
            for samples in (samples_at(sizes, place, rank) for place in range(len(sizes)))
        ]

    def _cached_rounds(self, cell: Cell) -> int:
        if cell.unit in self._cache.done:
            return self._task.rounds
        # A unit with all its steps is finished together with the others, so one step is repeated.
        return min(len(self._cache.steps.get(cell.unit, ())), self._task.rounds - 1)

    def _chosen(self, precision: str | None) -> dict[str, str]:
        if not precision:
            return {}
        offered: Mapping[Any, tuple[str, ...]] = offers(self._device)
        settings = self.workload.settings
        return {
            name: chosen
            for name, chosen in matched(self.workload, {"*": precision}).items()
            if precision in offered.get(self.workload.operators[settings[name][0]].kind, PRECISIONS)
        }

    def _time_is_up(self) -> bool:
        """Whether the time is up on any rank. Collective."""
        up = time.perf_counter() - self._start > self._task.seconds
        if dist.get_world_size() == 1:
            return up
        flag = torch.tensor([up], dtype=torch.int32, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def _advance(self) -> None:
        self._done += 1
        self._progress(self._done, self._total)

    def _units(self) -> dict[str, Callable[[DeviceProfile], DeviceProfile]]:
        """By name, what adds a measurement to a profile."""
        plain, precisions = self._task.autocast or "fp32", self._task.precisions
        directions = [f"{source}>{p}" for p in precisions for source in (plain, "fp32")]
        directions += [f"{p}>{plain}" for p in precisions if p != "fp8"]
        if not self._task.autocast and "bf16" in offers(self._device)["linear"] and precisions:
            directions += ["fp32>bf16", "bf16>fp32", *(f"bf16>{p}" for p in precisions if p != "bf16")]
        units = {
            f"cast {direction}": partial(self._cast, direction)
            for direction in directions
            if len(set(direction.split(">"))) == 2 and "tf32" not in direction
        }
        return {
            **units,
            **{f"codec {bits}": partial(self._codec, bits) for bits in self._task.bits},
            **({"codec adaptive": self._adaptive_codec} if self._task.bits else {}),
            "launch": lambda profile: replace(profile, launch_s=launch_seconds(self._device)),
        }

    def _cast(self, direction: str, profile: DeviceProfile) -> DeviceProfile:
        return replace(profile, casts={**profile.casts, **cast_lines(self._device, (direction,))})

    def _codec(self, bits: int, profile: DeviceProfile) -> DeviceProfile:
        return replace(profile, codec={**profile.codec, str(bits): self._codec_times(bits, 1024, profile)})

    def _adaptive_codec(self, profile: DeviceProfile) -> DeviceProfile:
        return replace(profile, adaptive_codec=self._codec_times(ADAPTIVE_BITS, ADAPTIVE_BLOCK, profile))

    def _codec_times(self, bits: int, block: int, profile: DeviceProfile) -> CodecTime:
        """Error feedback takes the same time with any bits, and is measured once."""
        known = next(iter(profile.codec.values()), None)
        rounds = self._task.codec_rounds
        times = codec_times(bits, self._device, block=block, rounds=rounds, feedback=known is None)
        return times if known is None else replace(times, feedback=known.feedback)


def _gather(own: Any) -> list[Any]:
    """The values of all ranks, in rank order. Collective."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    return by_rank


def _first(own: Any, device: torch.device) -> Any:
    """The value of rank 0. Collective."""
    shared = [own]
    dist.broadcast_object_list(shared, device=device if device.type == "cuda" else None)
    return shared[0]


def cache_of(device: torch.device, extra: str = "") -> ProbeCache:
    """The cache for measurements of this device; times also depend on threads, or on the share of a GPU."""
    where = f"share-{os.environ.get('CUDA_MPS_ACTIVE_THREAD_PERCENTAGE', '100')}"
    if device.type == "cpu":
        where = f"{torch.get_num_threads()}-threads"
    return ProbeCache(
        called(device),
        f"{where}-{extra}" if extra else where,
        torch=torch.__version__,
        trimtab=trimtab.__version__,
        keep=EMULATION not in os.environ,
    )


def alone() -> bool:
    """Create a process group of one rank for DDP, if there is none; returns whether it was created."""
    if dist.is_initialized():
        return False
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return True
