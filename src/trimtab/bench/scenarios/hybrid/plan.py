"""The plans that `trimtab bench hybrid` runs: probed, damaged and allocated inside the job that they are for."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import Subset

import trimtab
from trimtab.bench.scenarios.shares.tasks import Passages, Task
from trimtab.cluster.profile import LOCAL
from trimtab.control.plans.active_plan import plan_text
from trimtab.measure.damage.indicators import gradient_damage
from trimtab.measure.device import Task as Probe
from trimtab.measure.device import usual_precisions
from trimtab.measure.fingerprint import fingerprint
from trimtab.measure.job import probe_job
from trimtab.models.gpt import Gpt
from trimtab.models.spec import ModelSpec
from trimtab.planning.make_plan import make_plan
from trimtab.planning.plan_file import parse_plan
from trimtab.precision_names import OWN
from trimtab.predict.links import Placement
from trimtab.predict.memory.step_peak import step_memory
from trimtab.predict.precision_patterns import matched

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from trimtab.cluster import Cluster
    from trimtab.planning.plan import Plan
    from trimtab.workload import Workload

BITS = (4, 8)
SIZES = {"cpu": (256, 2, 32, 64), "cuda": (1536, 6, 512, 32)}
"""Width, layers, bytes of a sample, and samples of a rank when all have the same. On CPUs communication takes the cores
that compute; many samples for few parameters keep that small beside what is compared."""

TRAINED = 12
"""Steps before damage is looked at: a model that knows nothing yet hardly cares where it is rounded."""

CALIBRATION, MOST_TOKENS = 2, 8192
"""Batches that damage is computed from, and how much of each: all values of a pass are kept in fp32. Fewer samples
than a rank will have make damage look larger, never smaller."""


def task(device: torch.device, seed: int = 0, size: Sequence[int] | None = None) -> Task:
    """A GPT over bytes, and the standard library's text; `size` as in `SIZES`."""
    width, layers, length, each = size or SIZES[device.type]
    torch.manual_seed(seed)
    model = Gpt(width=width, layers=layers, heads=max(1, width // 64), context=length).to(device)
    passages = Passages(length + 1)
    some = len(passages) - 64
    return Task(
        model=model,
        train=Subset(passages, range(some)),
        held_out=Subset(passages, range(some, len(passages))),
        loss=lambda called, batch: called(batch),
        each=each,
    )


def samples_of(data: Any, start: int, count: int, device: torch.device) -> torch.Tensor:
    """So many samples of a dataset, the same whenever asked for, far apart so that they differ."""
    return torch.stack([data[(start + i) * 7919 % len(data)] for i in range(count)]).to(device)


def autocast(device: torch.device) -> Any:
    """What the model computes in by itself: fp32 on a CPU, bf16 on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if _half(device) else nullcontext()


def _half(device: torch.device) -> str | None:
    return "bf16" if device.type == "cuda" else None


@dataclass(frozen=True, kw_only=True)
class Made:
    """What the job found out about itself, the same on every rank."""

    fixed: Plan
    free: Plan
    cluster: Cluster
    workload: Workload

    @property
    def uniform(self) -> tuple[dict[str, str], ...]:
        """By rank: a slow one wholly at its fastest precisions, a fast one as it is."""
        devices = self.cluster.devices
        fast = max(devices, key=lambda name: devices[name].speed)
        found: list[dict[str, str]] = []
        for name, count in self.fixed.ranks:
            role = self.fixed.roles[name]
            chosen = {
                operator: min(choices, key=lambda p: (choices[p].seconds, choices[p].damage))
                for operator, choices in role.choices.items()
            }
            lowered = {} if role.device == fast else {o: p for o, p in chosen.items() if p != OWN}
            found += [lowered] * count
        return tuple(found)

    def peak(self, samples: int, precisions: Mapping[str, str], bits: int | None) -> int:
        """Predicted bytes of a rank."""
        kind: Any = next(iter(self.cluster.devices.values())).kind
        return peak(self.workload, samples, precisions, kind, bits)


def peak(
    workload: Workload, samples: int, precisions: Mapping[str, str], kind: Any, bits: int | None = None
) -> int:
    return step_memory(
        workload.at_batch(samples),
        precisions,
        kind=kind,
        data_parallel=True,
        bits=bits,
        world=dist.get_world_size(),
    ).peak


def make(
    of: Task,
    cluster: Cluster,
    device: torch.device,
    memory_ratio: float | None,
    bits: Literal["auto", "adaptive"] = "auto",
) -> Made:
    """Probe, damage, allocate. Collective.

    Args:
        memory_ratio: where the last device class has so much of the first one's memory: then that is too little for
            a plain step, and enough with half of what lower precision can save.
    """
    model = copy.deepcopy(of.model)
    kind: Any = device.type

    half = max(1, of.each // 2)
    low = usual_precisions(device, _half(device))
    probed = probe_job(
        Probe(
            spec=ModelSpec(name="gpt", model=model, batch=(samples_of(of.train, 0, of.each, device),)),
            batches=tuple(dict.fromkeys((half, of.each, 2 * of.each - half))),
            precisions=low,
            bits=BITS,
            autocast=_half(device),
            seconds=inf,
        ),
        device,
        names := [rank.device for rank in cluster.ranks()],
        Placement(per_host=tuple(sum(host.devices.values()) for _, host in cluster.machines())),
        next(iter(cluster.links), LOCAL),
    )
    workload = probed.workload
    devices = dict(cluster.devices)
    if memory_ratio is not None:
        least = _scarce(workload, of.each, kind, low) / 2**30
        for name, gib in zip(names, (least / memory_ratio, least), strict=True):
            devices[name] = replace(devices[name], memory_gib=gib)
    cluster = replace(cluster, devices=devices, profile=probed.profile)
    texts: list[Any] = [None]
    if dist.get_rank() == 0:
        texts = [[plan_text(plan) for plan in _plans(of, model, cluster, workload, device, low, bits)]]
    dist.broadcast_object_list(texts)
    fixed, free = (parse_plan(text, source="the bench's plan") for text in texts[0])
    return Made(fixed=fixed, free=free, cluster=cluster, workload=workload)


def _scarce(workload: Workload, samples: int, kind: Any, precisions: Sequence[str]) -> float:
    """Half way between what a plain step takes and what it takes with everything in the precision that keeps least."""
    lowest = min(peak(workload, samples, matched(workload, {"*": low}), kind) for low in precisions)
    return (peak(workload, samples, {}, kind) + lowest) / 2


def _plans(
    of: Task,
    model: nn.Module,
    cluster: Cluster,
    workload: Workload,
    device: torch.device,
    low: Sequence[str],
    bits: Literal["auto", "adaptive"],
) -> Sequence[Plan]:
    total = of.each * cluster.world_size
    model.load_state_dict(of.model.state_dict())
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(TRAINED):
        with autocast(device):
            loss = of.loss(model, samples_of(of.train, step * of.each, of.each, device))
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    length = samples_of(of.train, 0, 1, device).shape[1]
    samples = max(1, min(total, MOST_TOKENS // length))
    batches = [samples_of(of.train, 10_000 + i * total, samples, device) for i in range(CALIBRATION)]
    with autocast(device):
        damages = gradient_damage(model, batches, precisions=low)
    return [
        make_plan(
            cluster,
            workload,
            {name: found for name, found in damages.items() if name in workload.settings},
            model=fingerprint(of.model),
            trimtab=trimtab.__version__,
            batch_size=total,
            batch=batch,
            bits=bits,
        )
        for batch in ("fixed", "free")
    ]
