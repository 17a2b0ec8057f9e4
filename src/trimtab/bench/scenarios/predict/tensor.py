"""Tensor-parallel plans (two ranks) and data x tensor plans (two groups of two), with even and uneven shares.

Probed are single steps of the whole model without communication, at three batch sizes, on all ranks at once, and the
all-reduce of activations and gradients. No step of a sharded model enters a prediction.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.api.tensor_parallel import tensor_parallel
from trimtab.bench.harness import Progress, part
from trimtab.bench.ranks import run_on_cluster
from trimtab.bench.scenarios.predict.rows import row
from trimtab.bench.trainer import Trainer
from trimtab.cluster import Cluster, Device, Host, Link, parse_rate
from trimtab.cluster.profile import LOCAL, PROFILE_VERSION, DeviceProfile, Profile
from trimtab.measure.capture.capture import capture_workload
from trimtab.measure.links import LinkProbe, link_times
from trimtab.measure.operators import StepTrainer, with_steps
from trimtab.models import tasks
from trimtab.planning.tensor.shares import BlockSize, share_blocks
from trimtab.predict.collectives import Placement
from trimtab.predict.operators.measured import Measured
from trimtab.predict.tensor import TensorJob, TensorSetting
from trimtab.sharding.unit_block import sharded_model

SIZES: dict[str, dict[str, int]] = {
    "cpu": {"width": 512, "heads": 16, "layers": 3, "context": 128, "samples": 1},
    "cuda": {"width": 4096, "heads": 32, "layers": 4, "context": 512, "samples": 2},
}
SMALLER = {"layers": 2}
"""With two groups on a GPU: four ranks hold four models each in one memory."""

SPEEDS = {"cpu": (1.0, 0.5), "cuda": (0.3, 0.15)}
LINKS = {"cpu": ("1gbit", "none"), "cuda": ("none",)}
PROBED = (2, 4, 8)
"""Samples, in the task's unit, of the steps that are probed."""

SMALL = 1 << 14
"""Bytes of a transfer that shows the cost of a message."""


class HeldOutLayout(NamedTuple):
    """What the ranks do; those of a group are neighbors."""

    shares: tuple[float, ...]
    """Of the units, by place in a group."""

    samples: tuple[int, ...]
    """In the task's unit, by group."""

    def __str__(self) -> str:
        return f"units {'/'.join(f'{share:g}' for share in self.shares)}, samples {'/'.join(map(str, self.samples))}"


TENSOR = (
    HeldOutLayout((0.5, 0.5), (4,)),
    HeldOutLayout((0.75, 0.25), (4,)),
    HeldOutLayout((0.625, 0.375), (4,)),
)
DATA_X_TENSOR = (
    HeldOutLayout((0.5, 0.5), (3, 3)),
    HeldOutLayout((0.75, 0.25), (3, 3)),
    HeldOutLayout((0.625, 0.375), (4, 2)),
)


def tensor_rows(device: str, rounds: int, progress: Progress) -> list[dict[str, Any]]:
    """One group of a fast and a slow rank."""
    return _rows(device, TENSOR, rounds, progress)


def data_x_tensor_rows(device: str, rounds: int, progress: Progress) -> list[dict[str, Any]]:
    """Two such groups that exchange gradients."""
    return _rows(device, DATA_X_TENSOR, rounds, progress)


def _rows(
    device: str, layouts: Sequence[HeldOutLayout], rounds: int, progress: Progress
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for index, link in enumerate(LINKS[device]):
        spec = {
            "device": device,
            "link": link,
            "layouts": list(layouts),
            "rounds": rounds,
            "size": SIZES[device] | (SMALLER if device == "cuda" and len(layouts[0].samples) > 1 else {}),
        }
        report = part(progress, index, len(LINKS[device]))
        # Slowing products down keeps the ranks in step; a quota would stop one in the middle of a collective.
        measured = run_on_cluster(_cluster(spec), on_rank, spec, report, throttle="gemm")
        rows += [
            {"model": "gpt", "link": link, **row(layout, of_layout)}
            for layout, of_layout in zip(layouts, measured, strict=True)
        ]
    return rows


def _cluster(spec: Mapping[str, Any]) -> Cluster:
    """A host and a device class for every rank."""
    groups = len(spec["layouts"][0][1])
    speeds = SPEEDS[spec["device"]] * groups
    link = None if spec["link"] == "none" else "link"
    names = "abcd"[: len(speeds)]
    return Cluster(
        version=1,
        devices={n: Device(kind=spec["device"], speed=s) for n, s in zip(names, speeds, strict=True)},
        links={"link": Link(gbit_per_s=parse_rate(spec["link"]))} if link else {},
        hosts=tuple(Host(name=f"host-{name}", devices={name: 1}, link=link) for name in names),
    )


def on_rank(spec: Mapping[str, Any], report: Progress) -> list[dict[str, Any]]:
    """For each layout what was predicted, measured, and measured again, by round."""
    job = _Job(spec)
    values: list[dict[str, Any]] = [{"predicted": [], "measured": [], "again": []} for _ in job.layouts]
    for round_ in range(spec["rounds"]):
        # Of single steps, averaged after they are predicted: ranks that vary wait for each other in every block.
        probed = [
            (Measured(job.workload, profile), job.on(profile)) for profile in (job.probe(), job.probe())
        ]
        predictors = [TensorJob(*pair) for pair in probed]
        for layout, own in zip(job.layouts, values, strict=True):
            steps = [predictor.step(job.setting(layout)) for predictor in predictors]
            own["predicted"].append(mean(step.step_s for step in steps))
            summed = steps[-1].all_reduce_s + steps[-1].exchange_s
            own["bottleneck"] = "communication" if summed > steps[-1].step_s / 2 else "compute"
        for which in ("measured", "again"):
            for trainer, own in zip(job.trainers, values, strict=True):
                own[which].append(trainer.step())
        report(round_ + 1, spec["rounds"])
    return values


class _Job:
    """One rank's part in probing and measuring."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.device = torch.device(spec["device"])
        self.layouts = [HeldOutLayout(tuple(shares), tuple(samples)) for shares, samples in spec["layouts"]]
        self.cluster = _cluster(spec)
        self.task = tasks.gpt(**spec["size"], device=self.device)
        self.unit = self.task.samples
        half = "bf16" if self.device.type == "cuda" else None
        self.workload = capture_workload(self.task.model, self._batch(PROBED[0]), autocast=half)
        self.names = list(self.cluster.devices)
        size = len(self.layouts[0].shares)
        self.groups = tuple(tuple(range(i, i + size)) for i in range(0, dist.get_world_size(), size))
        self._steps = StepTrainer(
            copy.deepcopy(self.task.model),
            self.workload,
            self.device,
            batch_of=lambda samples: self._batch(samples // self.unit),
            autocast=half,
        )
        self.mesh = DeviceMesh(spec["device"], torch.tensor(self.groups), mesh_dim_names=("dp", "tp"))
        self.trainers = [self._trainer(layout) for layout in self.layouts]
        self._link = LinkProbe(
            Placement.of((1,) * dist.get_world_size()),
            self.device,
            rows={"all_reduce": self._transfers()},
            collectives=["all_reduce"],
            awaited=[row[0] for row in self._transfers() if len(row) == 1 and row != (SMALL,)],
        )
        self._timed()
        for _ in range(3):  # the first transfers are slow, and all rounds count
            self._link.round()
        for trainer in self.trainers:
            for _ in range(3):
                trainer.step()

    def probe(self) -> Profile:
        """Single steps of every rank, and the link, right now."""
        own = with_steps(DeviceProfile(called=self.names[dist.get_rank()]), self.workload, self._timed())
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        self._link.round()
        link = next(iter(self.cluster.links), LOCAL)
        return Profile(
            version=PROFILE_VERSION,
            trimtab=trimtab.__version__,
            torch=torch.__version__,
            devices=dict(zip(self.names, every, strict=True)),
            links={link: dict(link_times(self._link, self.names))},
        )

    def on(self, profile: Profile) -> Cluster:
        """The cluster with its profile; without a link class all ranks are on one host."""
        if self.cluster.links:
            return replace(self.cluster, profile=profile)
        whole = Host(name="one", devices=dict.fromkeys(self.names, 1))
        return replace(self.cluster, hosts=(whole,), profile=profile)

    def setting(self, layout: HeldOutLayout) -> TensorSetting:
        blocks = {span.name: BlockSize(units=span.units, unit_bytes=1) for span in self.workload.units}
        counts = share_blocks(blocks, layout.shares)
        return TensorSetting(
            groups=self.groups,
            counts=tuple({name: own[i] for name, own in counts.items()} for i in range(len(layout.shares))),
            samples=tuple(samples * self.unit for samples in layout.samples),
        )

    def _timed(self) -> list[Any]:
        return [(n * self.unit, {}, [self._steps.timed(n * self.unit, {})]) for n in PROBED]

    def _transfers(self) -> list[tuple[int, ...]]:
        """Activations of the largest batch, and the buckets that groups exchange; single ones are waited for."""
        span = self.workload.units[0]
        output = self.workload.at_batch(PROBED[-1] * self.unit).operators[span.out].outputs[0].nbytes
        rows: list[tuple[int, ...]] = [(SMALL,), (output // 2,), (output,)]
        if len(self.groups) > 1:
            rows.append(tuple(bucket.nbytes // 2 for bucket in self.workload.buckets))
        return rows

    def _batch(self, samples: int) -> tuple[torch.Tensor, ...]:
        return self.task.batch(samples * self.unit, step=samples)

    def _trainer(self, layout: HeldOutLayout) -> Trainer:
        model: nn.Module = tensor_parallel(
            copy.deepcopy(self.task.model), self.mesh, shares=list(layout.shares)
        )
        samples = layout.samples[self.mesh.get_local_rank("dp")]
        counts = self.setting(layout).counts
        own = {block.name: block.count for block in sharded_model(model, "bench").blocks.values()}
        assert own == counts[self.mesh.get_local_rank("tp")]
        if len(self.groups) > 1:
            model = DistributedDataParallel(model, process_group=self.mesh.get_group("dp"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return Trainer(model, optimizer, lambda step: self._batch(samples), self.device, half=True)
