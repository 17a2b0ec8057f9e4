"""What each rank of `trimtab bench predict` does: probe, predict, measure, round after round."""

from __future__ import annotations

import copy
import time
import warnings
from contextlib import nullcontext
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.predict import LOW, PROBED, two_ranks
from trimtab.bench.predict_models import make_task
from trimtab.cluster.profile import (
    LOCAL,
    PROFILE_VERSION,
    CodecTime,
    CollectiveTime,
    DeviceProfile,
    Line,
    OperatorTime,
    Profile,
)
from trimtab.codec import Block
from trimtab.predict.links import Collective, Placement
from trimtab.predict.measured import Measured
from trimtab.predict.memory import memory
from trimtab.predict.step import JobSetting, RankSetting, predict_step
from trimtab.predict.timeline import bottleneck
from trimtab.runtime.probe_casts import cast_lines
from trimtab.runtime.probe_codec import CodecProbe
from trimtab.runtime.probe_links import LinkProbe
from trimtab.runtime.probe_steps import StepClock, StepTimes, operator_times, without_communication
from trimtab.runtime.set_precision import set_precision
from trimtab.workload.capture import capture

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trimtab.workload import Workload

SLOW = "slow"
STEPS = 2
"""Timed steps of each kind in a round."""


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """For each plan what was predicted, measured, and measured again, by round."""
    torch.set_num_threads(1)
    # torch's own convolution of one channel; it changes nothing here.
    warnings.filterwarnings("ignore", message="Grad strides do not match")
    job = Job(spec)
    job.settle()
    kept: list[dict[str, Any]] = [
        {"predicted": [], "naive": [], "measured": [], "again": []} for _ in job.plans
    ]
    for round_ in range(spec["rounds"]):
        probed = [Measured(job.workload, profile) for profile in job.probe()]
        for plan, of in zip(job.plans, kept, strict=True):
            steps = [predict_step(one, job.cluster, plan) for one in probed]
            of["predicted"].append(mean(step.step_s for step in steps))
            of["naive"].append(
                mean(predict_step(one, job.cluster, plan, naive=True).step_s for one in probed)
            )
            of["bottleneck"] = bottleneck(steps[-1])
        for which in ("measured", "again"):
            for plan, of in zip(job.plans, kept, strict=True):
                of[which].append(job.measure(plan))
        report(round_ + 1, spec["rounds"])
    if job.device.type == "cuda":
        for plan, of in zip(job.plans, kept, strict=True):
            of["memory"] = job.memory(plan)
    return kept


class Job:
    """The models of one rank: one for each way to communicate."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.device = torch.device(spec["device"])
        self.cluster = two_ranks(spec["device"], spec["link"])
        self._task = make_task(spec["model"], self.device)
        unit = self._task.unit
        self._name = ("fast", SLOW)[dist.get_rank()]
        self._sizes = [size * unit for size in PROBED]
        cuda = self.device.type == "cuda"
        self.workload: Workload = capture(
            self._task.model, self._task.batch(self._sizes[0]), autocast="bf16" if cuda else None
        )
        self._low = {
            name: LOW for name, (first, *_) in self.workload.settings.items() if self._may_be_low(first)
        }
        self.plans = [
            JobSetting(
                bits=bits,
                ranks={
                    "fast": RankSetting(samples=shares[0] * unit, precisions={}),
                    SLOW: RankSetting(samples=shares[1] * unit, precisions=self._chosen(low)),
                },
            )
            for shares, low, bits in spec["plans"]
        ]
        self._casts = (f"bf16>{LOW}", f"fp32>{LOW}") if cuda else (f"fp32>{LOW}",)
        self._trainers: dict[Any, tuple[torch.nn.Module, DistributedDataParallel, torch.optim.Optimizer]] = {}
        self._static: dict[Any, int] = {}
        """Bytes that each trainer holds between steps (CUDA)."""
        self._bits = sorted({plan.bits for plan in self.plans if plan.bits is not None})
        self._link: LinkProbe | None = None

    def settle(self) -> None:
        """Let DDP rebuild its buckets, kernels compile and caches fill."""
        self._trainers["probe"] = self._trainer("probe")
        for precisions in ({}, self._low):
            for size in self._sizes:
                self._timed_step(precisions, size)
        for plan in self.plans:
            before = self._allocated()
            fresh = plan.bits not in self._trainers
            if fresh:
                self._trainers[plan.bits] = self._trainer(plan.bits)
            for _ in range(2):
                self.measure(plan)
            if fresh:
                self._static[plan.bits] = self._allocated() - before

    def probe(self) -> list[Profile]:
        """What both ranks, the link and the codec do right now: a profile for each timed step.

        A step is as long as its slower rank, and on a machine that flutters that is longer than the longer of two
        usual times. So steps are not averaged before they are replayed, but after.
        """
        taken: list[dict[tuple[bool, int], StepTimes]] = []
        for _ in range(STEPS):
            steps: dict[tuple[bool, int], StepTimes] = {}
            for low in (True, False):
                for size in self._sizes:
                    lowered = low and self._name == SLOW
                    steps[lowered, size] = self._timed_step(self._low if lowered else {}, size)
            taken.append(steps)
        casts = cast_lines(self.device, self._casts)
        codec = {str(bits): self._codec(bits) for bits in self._bits}
        links = {next(iter(self.cluster.links), LOCAL): self._links()}
        both: list[Any] = [None, None]
        dist.all_gather_object(both, [self._profile(steps, casts, codec) for steps in taken])
        return [
            Profile(
                version=PROFILE_VERSION,
                trimtab=trimtab.__version__,
                torch=torch.__version__,
                devices=dict(zip(("fast", SLOW), pair, strict=True)),
                links=links,
            )
            for pair in zip(*both, strict=True)
        ]

    def _profile(
        self,
        steps: Mapping[tuple[bool, int], StepTimes],
        casts: dict[str, Line],
        codec: dict[str, CodecTime],
    ) -> DeviceProfile:
        operators: dict[str, OperatorTime] = {}
        for (low, size), step in steps.items():  # plain steps last: they know best what nobody set
            precisions = self._low if low else {}
            operators |= operator_times(self.workload.at_batch(size), [step], precisions)
        elements = sum(p.tensor.numel for p in self.workload.parameters if p.trainable)
        update = median(step.optimiser for step in steps.values())
        return DeviceProfile(
            called=self._name,
            operators=operators,
            casts=casts,
            codec=codec,
            batches={self.workload.model: tuple(self._sizes)},
            optimiser=Line(a=update / elements, c=0.0),
        )

    def memory(self, plan: JobSetting) -> list[float]:
        """For each rank, predicted over allocated bytes at the peak of a step (CUDA)."""
        own = plan.ranks[self._name]
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.measure(plan)
        allocated = self._static[plan.bits] + torch.cuda.max_memory_allocated() - before
        predicted = memory(
            self.workload.at_batch(own.samples),
            own.precisions,
            kind="cuda",
            data_parallel=True,
            bits=plan.bits,
            world=2,
            workspace=0,  # the library's was taken by the first model that ran
        )
        both: list[Any] = [None, None]
        dist.all_gather_object(both, predicted.peak / allocated)
        return both

    def measure(self, plan: JobSetting) -> float:
        """Seconds of one step, until the last rank has ended it."""
        own = plan.ranks[self._name]
        module, ddp, optimiser = self._trainers[plan.bits]
        set_precision(module, own.precisions)
        batch = self._task.batch(own.samples)
        self._together()
        start = time.perf_counter()
        with self._half():
            loss = ddp(*batch)
        loss.backward()
        _update(optimiser)
        self._together()
        return time.perf_counter() - start

    def _timed_step(self, precisions: Mapping[str, str], size: int) -> StepTimes:
        module, ddp, optimiser = self._trainers["probe"]
        set_precision(module, precisions)
        batch = self._task.batch(size)
        clock = StepClock(module, self.workload, self.device)
        self._together()

        def loss() -> torch.Tensor:
            with self._half():
                found: torch.Tensor = ddp(*batch)
                return found

        return clock.step(loss, lambda: _update(optimiser))

    def _links(self) -> dict[str, CollectiveTime]:
        """From all rounds so far: a link does not drift as a busy machine does."""
        if self._link is None:
            self._link = LinkProbe(
                Placement(per_host=(1, 1)),
                self.device,
                sizes=self._transfers(),
                collectives=("all_reduce", "all_gather") if self._bits else ("all_reduce",),
            )
            self._link.round()
        self._link.round()
        self._link.round()
        return {
            collective: CollectiveTime(
                per_message_s=fits[0].per_message_s,
                per_byte_s=fits[0].per_byte_s,
                drag={"fast": fits[0].drag, SLOW: fits[1].drag},
            )
            for collective, fits in self._link.fits().items()
        }

    def _transfers(self) -> dict[Collective, tuple[int, ...]]:
        """Bytes of the trial transfers: as large as the job's own, since a full queue makes large ones slower."""
        largest = max(bucket.nbytes for bucket in self.workload.buckets)
        packed = largest * max(self._bits, default=8) // 32
        return {
            "all_reduce": (1 << 14, max(1 << 16, largest // 8), max(1 << 18, largest)),
            "all_gather": (1 << 14, max(1 << 16, packed // 4), max(1 << 18, packed)),
        }

    def _codec(self, bits: int) -> CodecTime:
        probe = CodecProbe(bits, self.device)
        probe.round()
        return CodecTime(**{which: Line(a=a, c=c) for which, (a, c) in probe.fits().items()})

    def _trainer(self, way: Any) -> tuple[torch.nn.Module, DistributedDataParallel, torch.optim.Optimizer]:
        module = copy.deepcopy(self._task.model)
        ddp = DistributedDataParallel(module)
        if way == "probe":
            without_communication(ddp)
        elif way is not None:
            trimtab.compress(ddp, Block(bits=way))
        return module, ddp, torch.optim.AdamW(module.parameters(), lr=1e-4)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def _may_be_low(self, index: int) -> bool:
        return self.workload.operators[index].kind in ("linear", "conv")

    def _chosen(self, low: str) -> dict[str, str]:
        names = list(self._low)
        kept = {"none": [], "all": names, "half": names[::2], "third": names[1::3]}[low]
        return dict.fromkeys(kept, LOW)

    def _half(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def _together(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _update(optimiser: torch.optim.Optimizer) -> None:
    optimiser.step()
    optimiser.zero_grad()
