"""Plans for FSDP2: a GPT sharded over two unequal ranks, its gradients and weights in fewer bits.

Probed are single steps without communication, at three batch sizes and not sharded, the collectives that the units
need, the codec, and what FSDP2 adds to the steps of another, tiny model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import trimtab
from trimtab.bench.harness import Progress, part
from trimtab.bench.ranks import run_on_cluster
from trimtab.bench.scenarios.predict.ddp import HeldOutPlan
from trimtab.bench.scenarios.predict.ranks import NAMES, Job, two_hosts
from trimtab.bench.scenarios.predict.rows import row
from trimtab.bench.trainer import Trainer
from trimtab.cluster.profile import CollectiveTime, DeviceProfile
from trimtab.codec import Block
from trimtab.measure.kernels import codec_times
from trimtab.measure.links import LinkProbe, link_times
from trimtab.measure.sharded import ShardedProbe
from trimtab.predict.collectives import Collective
from trimtab.predict.fsdp import predict_fsdp
from trimtab.predict.fsdp_units import Sharding, fsdp_units, shard_bytes
from trimtab.predict.memory.sharded_peak import sharded_memory
from trimtab.predict.operators.measured import Measured
from trimtab.predict.replay.timeline import bottleneck
from trimtab.wire_format import WEIGHT_BLOCK

MODEL = "gpt"
LINKS = {"cpu": ("300mbit", "1gbit"), "cuda": ("none",)}
SMALL = 1 << 14
"""Bytes of a transfer that shows the cost of a message."""

TRIALS = 12
"""Of each transfer after computing, in a round: a step has fourteen, each with its pause."""


class HeldOutSharding(NamedTuple):
    """What the two ranks do; weights are gathered exactly where `weight_bits` is None."""

    shares: tuple[int, int]
    bits: int | None = None
    weight_bits: int | None = None
    keep: bool = False

    def __str__(self) -> str:
        weights = f"weights {self.weight_bits or 'fp32'} bits{', kept' if self.keep else ''}"
        return f"{self.shares[0]}/{self.shares[1]}, gradients {self.bits or 'fp32'} bits, {weights}"


PLANS = (
    HeldOutSharding((5, 3)),
    HeldOutSharding((5, 3), 4),
    HeldOutSharding((5, 3), 8, 8),
    HeldOutSharding((5, 3), 8, keep=True),
)


def fsdp_rows(device: str, rounds: int, progress: Progress) -> list[dict[str, Any]]:
    """Every plan over every link."""
    rows: list[dict[str, Any]] = []
    for index, link in enumerate(LINKS[device]):
        spec = {"device": device, "model": MODEL, "link": link, "rounds": rounds, "per_host": 1}
        report = part(progress, index, len(LINKS[device]))
        measured = run_on_cluster(two_hosts(device, link), on_rank, spec, report)
        rows += [
            {"model": MODEL, "link": link, **row(plan, of_plan)}
            for plan, of_plan in zip(PLANS, measured, strict=True)
        ]
    return rows


def on_rank(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
    """For each plan what was predicted, measured, and measured again, by round."""
    job = FsdpJob(spec)
    job.settle()
    values: list[dict[str, Any]] = [{"predicted": [], "measured": [], "again": []} for _ in PLANS]
    for round_ in range(spec["rounds"]):
        probed = [Measured(job.workload, profile) for profile in job.probe()]
        for setting, plan, own in zip(job.plans, PLANS, values, strict=True):
            sharding = Sharding(keep=plan.keep, weight_bits=plan.weight_bits)
            sharded = replace(setting, sharding=sharding)
            steps = [predict_fsdp(one, job.cluster, sharded) for one in probed]
            own["predicted"].append(mean(step.step_s for step in steps))
            own["bottleneck"] = bottleneck(steps[-1])
        for which in ("measured", "again"):
            for place, own in enumerate(values):
                own[which].append(job.measure_sharded(place))
        report(round_ + 1, spec["rounds"])
    if job.device.type == "cuda":
        for place, own in enumerate(values):
            own["memory"] = job.memory_sharded(place)
    return values


class FsdpJob(Job):
    """One rank's part in probing and measuring sharded steps."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__({**spec, "plans": [HeldOutPlan(plan.shares, "none", plan.bits) for plan in PLANS]})
        self.low, self._casts = {}, ()
        self._sharded = ShardedProbe(self.device)
        self._of_plan: list[Trainer] = []
        self._allocated_by: list[int] = []

    def settle(self) -> None:
        self._steps()
        for place, plan in enumerate(PLANS):
            before = self._allocated()
            self._of_plan.append(self._wrapped(plan))
            for _ in range(2):
                self.measure_sharded(place)
            self._allocated_by.append(self._allocated() - before)

    def _wrapped(self, plan: HeldOutSharding) -> Trainer:
        model: Any = copy.deepcopy(self.task.model)
        for unit in fsdp_units(self.workload)[1:]:
            fully_shard(model.get_submodule(unit.name), reshard_after_forward=not plan.keep)
        fully_shard(model)
        if plan.bits is not None:
            trimtab.compress(model, Block(bits=plan.bits), weight_bits=plan.weight_bits)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return Trainer(model, optimizer, lambda step: (), self.device, half=True)

    def measure_sharded(self, place: int) -> float:
        """Seconds of one step of a plan."""
        samples = self.plans[place].ranks[self.name].samples
        trainer = self._of_plan[place]
        trainer.batch = lambda step: self._batch(samples)
        return trainer.step()

    def memory_sharded(self, place: int) -> list[float]:
        """For each rank, predicted over allocated bytes at the peak of a step (CUDA)."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.measure_sharded(place)
        allocated = self._allocated_by[place] + torch.cuda.max_memory_allocated() - before
        plan, samples = PLANS[place], self.plans[place].ranks[self.name].samples
        predicted = sharded_memory(
            self.workload.at_batch(samples),
            ways=2,
            kind="cuda",
            keep=plan.keep,
            bits=plan.bits,
            weight_bits=plan.weight_bits,
            workspace=0,  # the first steps have allocated the library's
        )
        both: list[Any] = [None, None]
        dist.all_gather_object(both, predicted.peak / allocated)
        return both

    def probe(self) -> list[Any]:
        return self._profiles()

    def _kernels(self) -> DeviceProfile:
        codec = {str(bits): codec_times(bits, self.device, rounds=1) for bits in self.bits}
        return DeviceProfile(called=self.name, codec=codec, sharded=self._sharded.round())

    def _links(self) -> dict[str, CollectiveTime]:
        """From all rounds so far, with single transfers: that is how the units' are waited for."""
        if self._link is None:
            rows: dict[Collective, list[tuple[int, ...]]] = {
                name: [(SMALL,)] for name in ("all_gather", "all_reduce", "all_to_all")
            }
            for unit in fsdp_units(self.workload):
                rows["all_reduce"].append((2 * shard_bytes(unit.trainable, 2, None),))
                rows["all_gather"].append((shard_bytes(unit.parameters, 2, None),))
                rows["all_gather"].append((shard_bytes(unit.parameters, 2, 8, WEIGHT_BLOCK),))
                rows["all_to_all"] += [(shard_bytes(unit.trainable, 2, bits),) for bits in self.bits]
            distinct = {name: sorted(set(several)) for name, several in rows.items()}
            awaited = {
                name: [row[0] for row in several if row != (SMALL,)] for name, several in distinct.items()
            }
            self._link = LinkProbe(
                self.placement,
                self.device,
                rows=distinct,
                collectives=list(distinct),
                awaited=awaited,
                trials=TRIALS,
            )
            for _ in range(3):  # the first transfers are slow, and all rounds count
                self._link.round()
        self._link.round()
        return link_times(self._link, NAMES)
