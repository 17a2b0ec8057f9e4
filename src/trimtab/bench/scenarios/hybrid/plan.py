"""The plans that `trimtab bench hybrid` trains by: probed and planned inside the job that they are for."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

import trimtab
from trimtab.bench.trainer import autocast
from trimtab.cluster import Cluster
from trimtab.cluster.profile import LOCAL
from trimtab.control.plans.active_plan import plan_text
from trimtab.measure.damage.indicators import gradient_damage
from trimtab.measure.device import Task as Probe
from trimtab.measure.fingerprint import fingerprint
from trimtab.measure.interfaces import link_classes
from trimtab.measure.job import probe_job
from trimtab.measure.products import usual_precisions
from trimtab.models import tasks
from trimtab.models.spec import ModelSpec
from trimtab.models.tasks import Task
from trimtab.planning.make_plan import Bits, make_plan
from trimtab.planning.plan import Plan, parse_plan
from trimtab.precision_names import OWN
from trimtab.predict.collectives import Placement
from trimtab.predict.memory.step_peak import step_memory
from trimtab.predict.precision_patterns import matched
from trimtab.workload import Workload

BITS = (4, 8)

SIZES = {"cpu": (256, 2, 32, 128), "cuda": (1536, 6, 512, 32)}
"""Width, layers, bytes of a sample, and samples of a rank when all have the same. On CPUs communication takes cores
from computing; many samples for few parameters keep that small: 0.2 s a step where products in bf16 are native."""

TRAINED = 12
"""Steps before damage is computed: a model that has learned nothing yet is hardly sensitive to rounding."""

CALIBRATION, MOST_TOKENS = 2, 8192
"""Batches that damage is computed from, and tokens of each: all values of a pass are kept in fp32. With fewer samples
than a rank will have, damage looks larger, never smaller."""


_BATCH_MODES: tuple[Literal["fixed", "free"], ...] = ("fixed", "free")

NAMES = ("fast", "slow")
"""Of the two hosts, and of their device classes."""


def make_task(device: torch.device, seed: int = 0, size: Sequence[int] | None = None) -> Task:
    """A GPT on Python source; `size` as in `SIZES`."""
    width, layers, length, samples = size or SIZES[device.type]
    return tasks.gpt(
        width=width,
        layers=layers,
        heads=max(1, width // 64),
        context=length,
        samples=samples,
        device=device,
        seed=seed,
    )


def samples_of(task: Task, start: int, count: int) -> torch.Tensor:
    """Samples of a task's text, the same on every call, far apart so that they differ."""
    data: Any = task.train
    return torch.stack([data[(start + i) * 7919 % len(data)] for i in range(count)]).to(task.device)


def _half(device: torch.device) -> str | None:
    return "bf16" if device.type == "cuda" else None


@dataclass(frozen=True, kw_only=True)
class Plans:
    """The job's plans and what they were made from, the same on every rank."""

    fixed: Plan
    free: Plan
    cluster: Cluster
    workload: Workload

    @property
    def uniform(self) -> tuple[dict[str, str], ...]:
        """By rank: a slow one wholly in its fastest precisions, a fast one as it is."""
        devices = self.cluster.devices
        fast = max(devices, key=lambda name: devices[name].speed)
        by_rank: list[dict[str, str]] = []
        for name, count in self.fixed.ranks:
            role = self.fixed.roles[name]
            chosen = {
                operator: min(choices, key=lambda p: (choices[p].seconds, choices[p].damage))
                for operator, choices in role.choices.items()
            }
            lowered = {} if role.device == fast else {o: p for o, p in chosen.items() if p != OWN}
            by_rank += [lowered] * count
        return tuple(by_rank)

    def peak(self, samples: int, precisions: Mapping[str, str]) -> int:
        """Predicted bytes of a rank."""
        kind: Any = next(iter(self.cluster.devices.values())).kind
        return peak(self.workload, samples, precisions, kind)


def peak(workload: Workload, samples: int, precisions: Mapping[str, str], kind: Any) -> int:
    return step_memory(workload.at_batch(samples), precisions, kind=kind, data_parallel=True).peak


def make_plans(
    task: Task,
    cluster: Cluster,
    memory_ratio: float | None = None,
    bits: Bits = "auto",
    fixed_bits: Bits = "auto",
    quick: bool = False,
) -> Plans:
    """Probe the job, compute the damage of lower precision and plan. Every rank calls this.

    Args:
        memory_ratio: if the last device class has this part of the first one's memory: what it has is then too little
            for a plain step, and enough with half of what lower precision can save.
        bits: of the plan with free shares.
        fixed_bits: of the plan with a fixed batch.
        quick: probe as the autopilot does, while a job is waiting.
    """
    device = task.device
    cluster, slowness = with_link_classes(cluster, device)
    model = copy.deepcopy(task.model)
    kind: Any = device.type
    half = max(1, task.samples // 2)
    low = usual_precisions(device, _half(device))
    probed = probe_job(
        Probe(
            spec=ModelSpec(name="gpt", model=model, batch=(samples_of(task, 0, task.samples),)),
            batches=tuple(dict.fromkeys((half, task.samples, 2 * task.samples - half))),
            precisions=low,
            bits=BITS,
            autocast=_half(device),
            seconds=inf,
            quick=quick,
        ),
        device,
        names := [rank.device for rank in cluster.ranks()],
        Placement.on(cluster),
        next(iter(cluster.links), LOCAL),
        slowness=slowness,
    )
    workload = probed.workload
    devices = dict(cluster.devices)
    if memory_ratio is not None:
        least = _scarce(workload, task.samples, kind, low) / 2**30
        for name, gib in zip(names, (least / memory_ratio, least), strict=True):
            devices[name] = replace(devices[name], memory_gib=gib)
    cluster = replace(cluster, devices=devices, profile=probed.profile)
    texts: list[Any] = [None]
    if dist.get_rank() == 0:
        texts = [
            [plan_text(plan) for plan in _plan_both(task, model, cluster, workload, low, fixed_bits, bits)]
        ]
    dist.broadcast_object_list(texts)
    fixed, free = (parse_plan(text, source="the bench's plan") for text in texts[0])
    return Plans(fixed=fixed, free=free, cluster=cluster, workload=workload)


def with_link_classes(cluster: Cluster, device: torch.device) -> tuple[Cluster, dict[str, float] | None]:
    """The cluster with the link classes that are found, as `trimtab probe` does, and their slowness. Collective."""
    if not cluster.links:
        return cluster, None
    ((name, link),) = cluster.links.items()
    machines = [host for host, machine in cluster.machines() for _ in range(sum(machine.devices.values()))]
    classes, slowness = link_classes(machines, device, name)
    fastest = link.gbit_per_s * max(slowness.values())
    links = {title: replace(link, gbit_per_s=fastest / slower) for title, slower in slowness.items()}
    hosts = tuple(replace(host, link=own) for host, own in zip(cluster.hosts, classes, strict=True))
    return replace(cluster, links=links, hosts=hosts), slowness


def _scarce(workload: Workload, samples: int, kind: Any, precisions: Sequence[str]) -> float:
    """Halfway between what a plain step needs and what it needs in the precision that keeps least."""
    plain = peak(workload, samples, {}, kind)
    lowered = (peak(workload, samples, matched(workload, {"*": low}), kind) for low in precisions)
    return (plain + min(lowered, default=plain)) / 2


def _plan_both(
    task: Task,
    model: nn.Module,
    cluster: Cluster,
    workload: Workload,
    low: Sequence[str],
    *bits: Bits,
) -> list[Plan]:
    """With a fixed batch, and with batch shares free."""
    total = task.samples * cluster.world_size
    model.load_state_dict(task.model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(TRAINED):
        with autocast(task.device):
            loss = model(samples_of(task, step * task.samples, task.samples))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    length = samples_of(task, 0, 1).shape[1]
    samples = max(1, min(total, MOST_TOKENS // length))
    batches = [samples_of(task, 10_000 + i * total, samples) for i in range(CALIBRATION)]
    with autocast(task.device):
        damages = gradient_damage(model, batches, precisions=low) if low else {}
    return [
        make_plan(
            cluster,
            workload,
            {name: by_precision for name, by_precision in damages.items() if name in workload.settings},
            model=fingerprint(task.model),
            trimtab=trimtab.__version__,
            batch_size=total,
            batch=batch,
            bits=own_bits,
            layout="data",
        )
        for batch, own_bits in zip(_BATCH_MODES, bits, strict=True)
    ]
