"""What each rank of `trimtab bench predict` runs: probe, predict, measure, round after round."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.api.set_precision import set_precision
from trimtab.bench.harness import Progress
from trimtab.bench.ranks import hosts
from trimtab.bench.trainer import Batch, Trainer
from trimtab.cluster import Cluster, Link
from trimtab.cluster.profile import (
    LOCAL,
    PROFILE_VERSION,
    CollectiveTime,
    DeviceProfile,
    Profile,
)
from trimtab.codec import Block
from trimtab.control.compression.ddp import compress_ddp, compression_of
from trimtab.control.shares.sampler import even_parts
from trimtab.measure.capture.capture import capture_workload
from trimtab.measure.host_links import inside_times
from trimtab.measure.kernels import cast_lines, codec_times
from trimtab.measure.links import LinkProbe, link_times, own_rows
from trimtab.measure.operators import StepTrainer, with_steps
from trimtab.measure.reductions import ReductionOverhead, with_overhead
from trimtab.measure.timing import StepTimes
from trimtab.models import tasks
from trimtab.precision.devices import offers
from trimtab.predict.collectives import BLOCK, Placement, Route
from trimtab.predict.memory.step_peak import step_memory
from trimtab.predict.operators.measured import Measured
from trimtab.predict.replay.timeline import bottleneck
from trimtab.predict.step import JobSetting, RankSetting, predict_step
from trimtab.predict.step_setting import StepSetting
from trimtab.wire_format import ADAPTIVE_BITS, ADAPTIVE_BLOCK
from trimtab.workload import Workload

SPEEDS = {"cpu": (1.0, 0.5), "cuda": (0.65, 0.35)}
SHARED_SPEEDS = (0.55, 0.45)
"""With two ranks on each host: as much as two cores have."""

NAMES = FAST, SLOW = "fast", "slow"
UNITS = 8
"""Units of samples in the batch of every step."""

PROBED = (2, 4, 6)
"""Units of the fast rank while operators are timed; the slow one has the rest."""

Exchange = tuple[int | None, int, Route | None, tuple[tuple[str, int | None], ...]]
"""What a trainer is made for: bits, block, route and bits by layer."""


def on_rank(spec: Mapping[str, Any], report: Progress) -> list[list[dict[str, Any]]]:
    """For each model and plan what was predicted, measured, and measured again, by round."""
    # From torch's own convolution of one channel; it changes nothing here.
    warnings.filterwarnings("ignore", message="Grad strides do not match")
    models, rounds = spec["models"], spec["rounds"]
    measured = []
    for index, model in enumerate(models):
        job = Job({**spec, "model": model})

        def advance(done: int, index: int = index) -> None:
            report(index * rounds + done, len(models) * rounds)

        measured.append(_rounds(job, rounds, advance))
        job.close()
        cuda = job.device.type == "cuda"
        del job
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()  # the other rank shares the memory
    return measured


def _rounds(job: Job, rounds: int, report: Callable[[int], None]) -> list[dict[str, Any]]:
    job.settle()
    by_plan: list[dict[str, Any]] = [
        {"predicted": [], "naive": [], "measured": [], "again": []} for _ in job.plans
    ]
    for round_ in range(rounds):
        probed = [Measured(job.workload, profile) for profile in job.probe()]
        for plan, values in zip(job.plans, by_plan, strict=True):
            steps = [predict_step(one, job.cluster, plan) for one in probed]
            values["predicted"].append(mean(step.step_s for step in steps))
            values["naive"].append(
                mean(predict_step(one, job.cluster, plan, naive=True).step_s for one in probed)
            )
            values["bottleneck"] = bottleneck(steps[-1])
        for which in ("measured", "again"):
            for plan, values in zip(job.plans, by_plan, strict=True):
                values[which].append(job.measure(plan))
        report(round_ + 1)
    if job.device.type == "cuda":
        for plan, values in zip(job.plans, by_plan, strict=True):
            values["memory"] = job.memory(plan)
    return by_plan


class Job:
    """One rank's part in probing and measuring."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.device = torch.device(spec["device"])
        self.per_host: int = spec["per_host"]
        self.placement = Placement.of((self.per_host,) * 2)
        self.cluster = linked(two_hosts(spec["device"], spec["link"], self.per_host))
        self.task = make_task(spec["model"], self.device)
        self.unit = self.task.samples
        self.names = [name for name in NAMES for _ in range(self.per_host)]
        self.name = self.names[dist.get_rank()]
        self._trainers: dict[Exchange, MicroBatchTrainer] = {}
        self._held: dict[Exchange, int] = {}
        cuda = self.device.type == "cuda"
        half = "bf16" if cuda else None
        self.workload: Workload = capture_workload(
            self.task.model, self._batch(PROBED[0] * self.unit), autocast=half
        )
        self.probe_trainer = StepTrainer(
            copy.deepcopy(self.task.model), self.workload, self.device, batch_of=self._batch, autocast=half
        )
        # Not every CPU multiplies int8 correctly.
        self._low = "int8" if "int8" in offers(self.device)["linear"] else "bf16"
        self.low = {
            name: self._low for name, (first, *_) in self.workload.settings.items() if self._may_be_low(first)
        }
        self.plans = [
            JobSetting(
                bits=bits,
                layer_bits=self._layer_bits() if layers == "mixed" else {},
                block=ADAPTIVE_BLOCK if layers == "short" else BLOCK,
                accumulate=accumulate,
                route=Route(inside="shared_memory" if route == "two levels" else None) if bits else None,
                ranks={
                    FAST: RankSetting(samples=shares[0] * self.unit, precisions={}),
                    SLOW: RankSetting(samples=shares[1] * self.unit, precisions=self._chosen(low)),
                },
            )
            for shares, low, bits, layers, accumulate, route in spec["plans"]
        ]
        self.bits = sorted(
            {
                bits
                for plan in self.plans
                for bits in (plan.bits, *plan.layer_bits.values())
                if bits and plan.block == BLOCK
            }
        )
        self._lowers = any(plan.ranks[self.name].precisions for plan in self.plans)
        self._short = any(plan.block != BLOCK for plan in self.plans)
        self._casts: tuple[str, ...] = () if cuda and self._low != "bf16" else ("fp32>bf16", "bf16>fp32")
        if self._low != "bf16":
            self._casts += (f"bf16>{self._low}", f"fp32>{self._low}")
        self._link: LinkProbe | None = None
        self._inside: dict[str, CollectiveTime] | None = None
        self._beyond: ReductionOverhead | None = None

    def settle(self) -> None:
        """Let DDP rebuild its buckets, kernels compile and caches fill."""
        self._steps()
        for plan in self.plans:
            before = self._allocated()
            key = exchange_of(plan)
            fresh = key not in self._trainers
            if fresh:
                self._trainers[key] = self._trainer(plan)
            for _ in range(3 if fresh else 1):
                self.measure(plan)
            if fresh:
                self._held[key] = self._allocated() - before

    def _trainer(self, plan: JobSetting) -> MicroBatchTrainer:
        """The job's model, exchanging gradients as the plan says."""
        ddp = DistributedDataParallel(copy.deepcopy(self.task.model))
        if plan.bits is not None:
            overrides = {
                name: None if bits is None else Block(bits=bits) for name, bits in plan.layer_bits.items()
            }
            compress_ddp(
                ddp, Block(bits=plan.bits, block=plan.block), overrides=overrides, planned_route=plan.route
            )
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
        return MicroBatchTrainer(ddp, optimizer, lambda step: (), self.device, half=True)

    def _batch(self, samples: int) -> tuple[torch.Tensor, ...]:
        return self.task.batch(samples, step=samples)

    def probe(self) -> list[Profile]:
        """How fast both ranks, the link and the codec are right now: profiles of single steps.

        A step takes as long as its slower rank, and where times vary that is longer than the longer of two typical
        times. So steps are not averaged before they are replayed, but after.
        """
        profiles, link = self._profiles(), next(iter(self.cluster.links), LOCAL)
        if not self.bits:
            return profiles
        if self._beyond is None:
            self._beyond = ReductionOverhead(self.workload, self.bits, self.placement, self.device)
        self._beyond.round()
        seconds = self._beyond.seconds(profiles[0], link, self.names)
        return [with_overhead(profile, link, seconds) for profile in profiles]

    def _profiles(self) -> list[Profile]:
        step_sets, kernels = self._steps(), self._kernels()
        link, measured = next(iter(self.cluster.links), LOCAL), self._links()
        every: list[Any] = [None] * len(self.names)
        dist.all_gather_object(every, [self._profile(steps, kernels) for steps in step_sets])
        return [
            Profile(
                version=PROFILE_VERSION,
                trimtab=trimtab.__version__,
                torch=torch.__version__,
                devices=dict(zip(NAMES, pair, strict=True)),
                links={link: measured} | self._local(),
            )
            for pair in zip(*every[:: self.per_host], strict=True)
        ]

    def _kernels(self) -> DeviceProfile:
        """What runs beside the model's operators."""
        codec = {str(bits): codec_times(bits, self.device, rounds=1, feedback=False) for bits in self.bits}
        short = None
        if self._short:
            short = codec_times(ADAPTIVE_BITS, self.device, block=ADAPTIVE_BLOCK, rounds=1, feedback=False)
        casts = cast_lines(self.device, self._casts)
        return DeviceProfile(called=self.name, casts=casts, codec=codec, adaptive_codec=short)

    def _steps(self) -> list[dict[tuple[bool, int], StepTimes]]:
        """Two sets of steps without communication, by whether all is low and by samples.

        While this rank has a share of the job's batch, the other has the rest, as in every plan: ranks that share a
        machine slow each other down. The fast rank has plain steps only, so it has two of each.
        """
        sets: list[dict[tuple[bool, int], StepTimes]] = []
        for low in (True, False):
            steps: dict[tuple[bool, int], StepTimes] = {}
            for share in PROBED:
                samples = (share if self.name == FAST else UNITS - share) * self.unit
                lowered = low and self._lowers
                steps[lowered, samples] = self.probe_trainer.timed(samples, self.low if lowered else {})
            sets.append(steps)
        # Plain steps last: they are the best source for operators whose precision is not set.
        return [sets[0] | sets[1]] * 2 if self._lowers else sets

    def _profile(self, steps: Mapping[tuple[bool, int], StepTimes], kernels: DeviceProfile) -> DeviceProfile:
        timed = [(samples, self.low if low else {}, [step]) for (low, samples), step in steps.items()]
        return with_steps(kernels, self.workload, timed, self.device.type)

    def memory(self, plan: JobSetting) -> list[float]:
        """For each rank, predicted over allocated bytes at the peak of a step (CUDA)."""
        own = plan.ranks[self.name]
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.measure(plan)
        allocated = self._held[exchange_of(plan)] + torch.cuda.max_memory_allocated() - before
        predicted = step_memory(
            self.workload.at_batch(-(-own.samples // plan.accumulate)),
            own.precisions,
            kind="cuda",
            data_parallel=True,
            bits=plan.bits,
            layer_bits=plan.layer_bits,
            block=plan.block,
            accumulate=plan.accumulate,
            world=len(self.names),
            workspace=0,  # the first model that ran has allocated the library's
        )
        every: list[Any] = [None] * len(self.names)
        dist.all_gather_object(every, predicted.peak / allocated)
        return every

    def measure(self, plan: JobSetting) -> float:
        """Seconds of one step of a plan."""
        own = plan.ranks[self.name]
        trainer = self._trainers[exchange_of(plan)]
        set_precision(trainer.module, own.precisions)
        *earlier, last = even_parts(own.samples, plan.accumulate)
        trainer.earlier = [self._batch(samples) for samples in earlier]
        trainer.batch = lambda step: self._batch(last)
        return trainer.step()

    def close(self) -> None:
        """Let go of everything; nothing is measured after this."""
        for trainer in self._trainers.values():
            compression = compression_of(trainer.model)
            if compression is not None:
                compression.close()
        self._trainers.clear()
        if self._beyond is not None:
            self._beyond.close()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def _links(self) -> dict[str, CollectiveTime]:
        """From all rounds so far: a link does not drift the way a busy machine does."""
        if self._link is None:
            rows = own_rows(self.workload, self.bits)
            # Two ranks have no use for it.
            used = [name for name in rows if name != "all_to_all" or len(self.names) > 2]
            self._link = LinkProbe(self.placement, self.device, rows=rows, collectives=used)
            self._link.round()
        self._link.round()
        return link_times(self._link, self.names)

    def _local(self) -> dict[str, dict[str, CollectiveTime]]:
        """The rate inside the hosts, where they have several ranks."""
        if self.per_host == 1:
            return {}
        group = dist.group.WORLD
        assert group is not None
        if self._inside is None:
            self._inside = inside_times(group, self.device)
        return {LOCAL: self._inside}

    def _layer_bits(self) -> dict[str, int | None]:
        """Unlike bits for unlike layers: every second one in 8 bits, every fifth uncompressed."""
        names = [name for name, bits in StepSetting(bits=4).bits_of(self.workload).items() if bits]
        return dict.fromkeys(names[::2], 8) | dict.fromkeys(names[::5])

    def _may_be_low(self, index: int) -> bool:
        kind = self.workload.operators[index].kind
        return kind in ("linear", "conv") and self._low in {**offers(self.device)}[kind]

    def _chosen(self, low: str) -> dict[str, str]:
        names = list(self.low)
        lowered = {"none": [], "all": names, "half": names[::2], "third": names[1::3]}[low]
        return dict.fromkeys(lowered, self._low)


class MicroBatchTrainer(Trainer):
    """A trainer whose step may have several batches; gradients are exchanged with the last."""

    earlier: Sequence[Batch] = ()

    def train(self, batch: Batch) -> torch.Tensor:
        assert isinstance(self.model, DistributedDataParallel)
        with self.model.no_sync():
            for one in self.earlier:
                self.forward(one).backward()
        return super().train(batch)


def exchange_of(plan: JobSetting) -> Exchange:
    """Plans with equal ones use one trainer."""
    return plan.bits, plan.block, plan.route, tuple(plan.layer_bits.items())


def two_hosts(device: str, link: str, per_host: int = 1) -> Cluster:
    """A fast and a slow host."""
    speeds = SPEEDS[device] if per_host == 1 else SHARED_SPEEDS
    return hosts(speeds, device, link=link, names=NAMES, per_host=per_host)


def linked(cluster: Cluster) -> Cluster:
    """With a link class between hosts of several ranks, which is measured: inside them it is another one."""
    if cluster.links or max(sum(host.devices.values()) for host in cluster.hosts) == 1:
        return cluster
    return replace(
        cluster,
        links={"between": Link(gbit_per_s=1.0)},
        hosts=tuple(replace(host, link="between") for host in cluster.hosts),
    )


def make_task(name: str, device: torch.device) -> tasks.Task:
    """What is trained, by name; `samples` is the unit that shares are counted in.

    Batches on a GPU are large enough to keep the device busy: where it waits for the host to launch kernels, a step
    takes as long as Python does, whatever the plan.
    """
    if name == "gpt" and device.type == "cuda":
        return tasks.gpt(width=1536, layers=8, heads=24, context=512, samples=4, device=device)
    if name == "gpt":
        return tasks.gpt(width=256, layers=4, heads=4, context=128, samples=1, device=device)
    if name == "conv":
        return tasks.convnet(96, 32, device)
    if name == "bert":
        return tasks.bert(1, device)
    return tasks.gpt2(5, device) if name == "gpt2" else tasks.vit(40, device)
