"""Measure a running job: its ranks' devices, the link between them, and the overhead of compressed buckets.

`trimtab probe`, the benches and the demo all use it. Collective: every rank calls it at the same point, and every
rank gets the same profile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import trimtab
from trimtab.cluster.profile import LOCAL, PROFILE_VERSION, CollectiveTime, DeviceProfile, Profile, smallest
from trimtab.measure.cache import ProbeCache
from trimtab.measure.device import DeviceProbe, Task, called
from trimtab.measure.host_links import inside_times
from trimtab.measure.links import ROWS, LinkProbe, link_times, own_rows
from trimtab.measure.out_of_memory import Agreement
from trimtab.measure.reductions import ReductionOverhead, with_overhead
from trimtab.measure.sharded import ShardedProbe
from trimtab.predict.collectives import COLLECTIVES, Collective, Placement
from trimtab.workload import Workload

LINK_ROUNDS, REDUCTION_ROUNDS, SHARDED_ROUNDS = 4, 4, 3

MOST_TRIAL_BYTES, QUICK_TRIAL_BYTES = 64 << 20, 4 << 20
"""Bytes of a model's buckets that are sent in trials: all of a large model would take minutes on a slow link."""


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What was measured of a job."""

    profile: Profile
    workload: Workload
    """At the batch of the task's model."""

    left: tuple[str, ...]
    """Measurements that this rank had no time for."""


def probe_job(
    task: Task,
    device: torch.device,
    names: Sequence[str],
    placement: Placement,
    link: str,
    *,
    slowness: Mapping[str, float] | None = None,
    cache: ProbeCache | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Probed:
    """Measure the profile of this rank's job.

    Args:
        names: the device class of every rank. A class gets the measurements of its first rank.
        placement: how many ranks each host has.
        link: the class of the link between them, `LOCAL` for an unnamed one.
        slowness: where hosts have links of several classes: by class how many times slower it is than `link`.
        cache: earlier measurements of this rank; without it nothing is cached.
    """
    rounds, reduction_rounds = (1, 1) if task.quick else (LINK_ROUNDS, REDUCTION_ROUNDS)
    most = QUICK_TRIAL_BYTES if task.quick else MOST_TRIAL_BYTES
    steps = rounds + (reduction_rounds if task.bits else 0) if len(names) > 1 else 0
    job_progress = _Progress(progress, steps)
    if cache is None:
        cache = ProbeCache(called(device), "", torch="", trimtab="", keep=False)
    device_probe = DeviceProbe(task, device, cache)
    own, left = device_probe.run(job_progress.move)
    if len(names) > 1 and not task.quick:  # what one rank alone would measure is another code path of torch's
        own = replace(own, sharded=ShardedProbe(device).typical(SHARDED_ROUNDS))
    everyone: list[Any] = [None] * len(names)
    dist.all_gather_object(everyone, own)
    devices: dict[str, DeviceProfile] = {}
    for name, device_profile in zip(names, everyone, strict=True):
        first = devices.setdefault(name, device_profile)
        devices[name] = replace(first, too_large=smallest(first.too_large, device_profile.too_large))
    profile = Profile(
        version=PROFILE_VERSION, trimtab=trimtab.__version__, torch=torch.__version__, devices=devices
    )
    if len(names) > 1:
        measured = _links(
            device_probe.workload,
            task.bits,
            device,
            names,
            placement,
            job_progress,
            rounds=rounds,
            most=most,
            slowness=slowness or {},
        )
        profile = replace(
            profile,
            links={name: _slower(measured, factor) for name, factor in (slowness or {link: 1.0}).items()},
        )
        group = dist.group.WORLD
        if link != LOCAL and task.bits and group is not None and (inside := inside_times(group, device)):
            profile = replace(profile, links={**profile.links, LOCAL: inside})
        bits = [b for b in task.bits if all(str(b) in of_rank.codec for of_rank in devices.values())]
        if bits:
            overhead = ReductionOverhead(device_probe.workload, bits, placement, device, most=most)
            for _ in range(reduction_rounds):
                overhead.round()
                job_progress.one()
            profile = with_overhead(profile, link, overhead.seconds(profile, link, names))
            overhead.close()
    return Probed(profile=profile, workload=device_probe.workload, left=tuple(left))


def _links(
    workload: Workload,
    bits: Sequence[int],
    device: torch.device,
    names: Sequence[str],
    placement: Placement,
    job_progress: _Progress,
    *,
    rounds: int,
    most: int,
    slowness: Mapping[str, float],
) -> dict[str, CollectiveTime]:
    rows: dict[Collective, Any] = dict.fromkeys(COLLECTIVES, ROWS)
    with Agreement(device).attempt():
        trials = rows | own_rows(workload, bits, most)
        link_probe = LinkProbe(placement, device, rows=trials, slowness=slowness)
    for _ in range(rounds):
        link_probe.round()
        job_progress.one()
    return link_times(link_probe, names)


def _slower(times: Mapping[str, CollectiveTime], factor: float) -> dict[str, CollectiveTime]:
    return {name: replace(time, per_byte_s=factor * time.per_byte_s) for name, time in times.items()}


class _Progress:
    """Continues the count after the devices are done."""

    def __init__(self, progress: Callable[[int, int], None], after: int) -> None:
        self._progress, self._after = progress, after
        self._done, self._total = 0, after

    def move(self, done: int, total: int) -> None:
        self._done, self._total = done, total + self._after
        self._progress(self._done, self._total)

    def one(self) -> None:
        self._done += 1
        self._progress(min(self._done, self._total), self._total)
