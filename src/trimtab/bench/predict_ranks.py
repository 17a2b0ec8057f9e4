"""What each rank of `trimtab bench predict` does: probe, predict, measure, round after round."""

from __future__ import annotations

import copy
import json
import time
from contextlib import nullcontext
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.bench.predict import LOW, PROBED
from trimtab.bench.predict_models import make_task
from trimtab.cluster import parse_cluster
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
from trimtab.predict.links import Placement
from trimtab.predict.measured import Measured
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
    job = Job(spec)
    job.settle()
    kept: list[dict[str, Any]] = [
        {"predicted": [], "naive": [], "measured": [], "again": []} for _ in job.plans
    ]
    for round_ in range(spec["rounds"]):
        profile = job.probe()
        measured = Measured(job.workload, profile)
        for plan, of in zip(job.plans, kept, strict=True):
            timeline = predict_step(measured, job.cluster, plan)
            of["predicted"].append(timeline.step_s)
            of["naive"].append(predict_step(measured, job.cluster, plan, naive=True).step_s)
            of["bottleneck"] = bottleneck(timeline)
        for which in ("measured", "again"):
            for plan, of in zip(job.plans, kept, strict=True):
                of[which].append(job.measure(plan))
        report(round_ + 1, spec["rounds"])
    return kept


class Job:
    """The models of one rank: one for each way to communicate."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.device = torch.device(spec["device"])
        self.cluster = parse_cluster(json.dumps(spec["cluster"]), source="bench", form="json")
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
        ways = {"probe": None} | {plan.bits: None for plan in self.plans}
        self._trainers = {way: self._trainer(way) for way in ways}
        placement = Placement(per_host=(1, 1))
        needed = sorted({plan.bits for plan in self.plans if plan.bits is not None})
        self._placement, self._bits = placement, needed

    def settle(self) -> None:
        """Let DDP rebuild its buckets, kernels compile and caches fill."""
        for plan in self.plans:
            for _ in range(2):
                self.measure(plan)
        for precisions in ({}, self._low):
            for size in self._sizes:
                self._timed_step(precisions, size)

    def probe(self) -> Profile:
        """What both ranks, the link and the codec do right now."""
        rounds: dict[tuple[bool, int], list[StepTimes]] = {}
        for _ in range(STEPS):
            for low in (False, True):
                for size in self._sizes:
                    taken = self._timed_step(self._low if low and self._name == SLOW else {}, size)
                    rounds.setdefault((low and self._name == SLOW, size), []).append(taken)
        operators: dict[str, OperatorTime] = {}
        for low in (True, False):  # what was not set is known best from the steps in which nothing was
            for size in self._sizes:
                if (low, size) in rounds:
                    precisions = self._low if low else {}
                    operators |= operator_times(self.workload.at_batch(size), rounds[low, size], precisions)
        elements = sum(p.tensor.numel for p in self.workload.parameters if p.trainable)
        update = median(step.optimiser for steps in rounds.values() for step in steps)
        own = DeviceProfile(
            called=self._name,
            operators=operators,
            casts=cast_lines(self.device, ("fp32>int8",)),
            codec={str(bits): self._codec(bits) for bits in self._bits},
            batches={self.workload.model: tuple(self._sizes)},
            optimiser=Line(a=update / elements, c=0.0),
        )
        links = self._links()
        both: list[Any] = [None, None]
        dist.all_gather_object(both, own)
        devices = dict(zip(("fast", SLOW), both, strict=True))
        return Profile(
            version=PROFILE_VERSION,
            trimtab=trimtab.__version__,
            torch=torch.__version__,
            devices=devices,
            links={next(iter(self.cluster.links), LOCAL): links},
        )

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
        bits = bool(self._bits)
        probe = LinkProbe(
            self._placement,
            self.device,
            sizes=(1 << 14, 1 << 18, 1 << 21),
            collectives=("all_reduce", "all_gather") if bits else ("all_reduce",),
        )
        probe.round()
        probe.round()
        return {
            collective: CollectiveTime(
                per_message_s=fits[0].per_message_s,
                per_byte_s=fits[0].per_byte_s,
                drag={"fast": fits[0].drag, SLOW: fits[1].drag},
            )
            for collective, fits in probe.fits().items()
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
