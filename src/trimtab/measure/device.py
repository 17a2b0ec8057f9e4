"""Measuring a job's devices, all ranks at once: a model's operators in each precision and batch size, casts, codec.

Every rank calls the same in the same order, whatever its cache holds and its clock says: what is measured, and when
the time is up, is agreed on. A rank alone does the same without asking anybody.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import trimtab
from trimtab.environment import EMULATION
from trimtab.errors import TrimtabError
from trimtab.measure.cache import ProbeCache
from trimtab.measure.capture.capture import capture_workload
from trimtab.measure.casts import cast_lines
from trimtab.measure.codec import CodecProbe
from trimtab.measure.lockstep import StepTrainer
from trimtab.measure.operators import with_steps
from trimtab.measure.timing import synchronize
from trimtab.precision.devices import offers
from trimtab.predict.precision_patterns import matched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trimtab.cluster.profile import DeviceProfile
    from trimtab.measure.operators import Timed
    from trimtab.models.spec import ModelSpec
    from trimtab.workload import Workload

WARMUP, ROUNDS = 1, 4
"""Rounds of steps that are not timed, and that are; in each round every precision has every batch size once."""


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


@dataclass(frozen=True)
class Cell:
    """A kind of step that one rank takes in every round."""

    samples: int
    precision: str | None
    unit: str
    """What its times are kept under."""


def usual_precisions(device: torch.device, autocast: str | None = None) -> tuple[str, ...]:
    """What is probed beside a model's own precision when nothing is said: all that may pay off on a device.

    That is tf32 and a half type for a model in fp32, and fp8 or else int8.
    """
    offered = offers(device)["linear"]
    own = () if autocast else tuple(name for name in ("tf32",) if name in offered)
    half = () if autocast else tuple(name for name in ("bf16", "fp16") if name in offered)[:1]
    return own + half + tuple(name for name in ("fp8", "int8") if name in offered)[:1]


def samples_at(sizes: Sequence[int], place: int, rank: int) -> int:
    """The batch size of a rank in a place of the round: odd ranks go through the sizes from the other end.

    So while one of two neighbours has a small share of the job's batch, the other has a large one, as under a plan;
    and whatever they share is about as busy throughout.
    """
    return sizes[place if rank % 2 == 0 else -1 - place]


class DeviceProbe:
    """Measures in units, which are kept; what every rank has kept from an earlier run is not measured again.

    Steps come in rounds, so that a machine that is slow for a while is slow for all of them, and medians over rounds
    leave out what was seldom.
    """

    def __init__(self, task: Task, device: torch.device, cache: ProbeCache) -> None:
        self._task, self._device, self._cache = task, device, cache
        self.workload: Workload = capture_workload(
            task.spec.model, task.spec.batch, loss=task.spec.loss, autocast=task.autocast
        )
        _refuse_unoffered(task.precisions, device)
        self._mark = fingerprint(self.workload)
        self._start = 0.0
        self._done, self._total = 0, 0

    def run(self, progress: Callable[[int, int], None]) -> tuple[DeviceProfile, list[str]]:
        """This rank's profile, and the names of units that there was too little time for. Collective.

        A unit of steps with fewer rounds than it should have is in the profile, and among those names.
        """
        cells = self._cells()
        units = dict(self._units())
        had = [self._had(cell) for cell in cells]
        asked: tuple[Any, ...] = (self._mark, self._task.batches, self._task.bits)
        missing = [name for name in units if name not in self._cache.done]
        every = _gathered((asked, had, missing))
        for rank, (theirs, _, _) in enumerate(every):
            if theirs != every[0][0]:
                raise TrimtabError(
                    f"probe: rank {rank} probes {theirs[0]} at batches {list(theirs[1])} and {list(theirs[2])} bits, "
                    f"rank 0 {every[0][0][0]} at {list(every[0][0][1])} and {list(every[0][0][2])} bits; give every "
                    "rank the same"
                )
        # What the rank that has least of it lacks: all of them take part.
        had = [min(counts) for counts in zip(*(counts for _, counts, _ in every), strict=True)]
        missing = list(dict.fromkeys(name for _, _, names in every for name in names))
        self._total = len(missing) + sum(WARMUP + ROUNDS - count for count in had if count < ROUNDS)
        self._start = time.perf_counter()
        left = self._others(units, missing, progress)
        return self._steps(cells, had, left, progress)

    def _others(
        self,
        units: dict[str, Callable[[DeviceProfile], DeviceProfile]],
        missing: Sequence[str],
        progress: Callable[[int, int], None],
    ) -> list[str]:
        """Everything but steps: short, and first, so that there is time for it."""
        left = []
        for name in missing:
            mine = name in units and name not in self._cache.done
            if self._time_is_up():
                left += [name] if mine else []
                continue
            if mine:
                self._cache.add(name, units[name](self._cache.profile))
            self._moved(progress)
        return left

    def _steps(
        self,
        cells: Sequence[Cell],
        had: Sequence[int],
        left: list[str],
        progress: Callable[[int, int], None],
    ) -> tuple[DeviceProfile, list[str]]:
        pending = [(cell, count) for cell, count in zip(cells, had, strict=True) if count < ROUNDS]
        finished = not pending or self._rounds(pending, progress)
        timed: dict[str, Timed] = {}
        for cell, _ in pending:
            if not finished and cell.unit in self._cache.done:
                continue  # the other ranks lack it; what is known here is better than a part
            if not finished and cell.unit not in left:
                left.append(cell.unit)
            if steps := self._cache.steps.get(cell.unit):
                timed[cell.unit] = cell.samples, self._chosen(cell.precision), steps
        profile = self._cache.profile
        if timed:
            profile = with_steps(profile, self.workload, list(timed.values()))
        if finished:
            for unit in timed:
                self._cache.add(unit, profile)
        return profile, left

    def _rounds(self, pending: Sequence[tuple[Cell, int]], progress: Callable[[int, int], None]) -> bool:
        """Time what is pending, in rounds; whether there was time for all of them."""
        spec = self._task.spec
        trainer = StepTrainer(
            spec.model,
            self.workload,
            self._device,
            batch_of=spec.batch_of,
            loss_of=spec.loss_of,
            autocast=self._task.autocast,
        )
        try:
            for round_ in range(-WARMUP, ROUNDS):
                for cell, count in pending:
                    if 0 <= round_ < count:
                        continue
                    if self._time_is_up():
                        return False
                    step = trainer.timed(cell.samples, self._chosen(cell.precision))
                    if round_ >= 0:
                        self._cache.steps.setdefault(cell.unit, []).append(step)
                    self._moved(progress)
                self._cache.save()
        finally:
            self._cache.save()
            trainer.close()
        return True

    def _cells(self) -> list[Cell]:
        """A round. Plain steps are last; a rank with fewer precisions than another has more of them."""
        own = list(self._task.precisions)
        most = max(_gathered(len(own)))
        chosen: list[str | None] = [*own, *[None] * (most - len(own)), None]
        rank, sizes = dist.get_rank(), self._task.batches
        return [
            Cell(samples, precision, f"steps {self._mark} batch {samples} {precision or 'plain'}")
            for precision in chosen
            for samples in (samples_at(sizes, place, rank) for place in range(len(sizes)))
        ]

    def _had(self, cell: Cell) -> int:
        if cell.unit in self._cache.done:
            return ROUNDS
        # A unit whose steps are all there is finished with the others, so one is taken anew.
        return min(len(self._cache.steps.get(cell.unit, ())), ROUNDS - 1)

    def _chosen(self, precision: str | None) -> dict[str, str]:
        return matched(self.workload, {"*": precision}) if precision else {}

    def _time_is_up(self) -> bool:
        """Whether it is on any rank. Collective."""
        up = time.perf_counter() - self._start > self._task.seconds
        if dist.get_world_size() == 1:
            return up
        flag = torch.tensor([up], dtype=torch.int32, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def _moved(self, progress: Callable[[int, int], None]) -> None:
        self._done += 1
        progress(self._done, self._total)

    def _units(self) -> Iterator[tuple[str, Callable[[DeviceProfile], DeviceProfile]]]:
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


def _gathered(own: Any) -> list[Any]:
    """What every rank has, in rank order. Collective."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def launch_seconds(device: torch.device) -> float:
    """What the host takes to start a small kernel; on a CPU there is nothing to start."""
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


def fingerprint(workload: Workload) -> str:
    """Short, and the same for models whose operators have the same shapes."""
    from trimtab.predict.operators.costs import key_of

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
        keep=EMULATION not in os.environ,
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
