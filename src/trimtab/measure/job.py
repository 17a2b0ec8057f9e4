"""Measuring a running job: its ranks' devices, what joins them, and what compressed buckets take beyond both.

The one way to probe: `trimtab probe`, the benches and the demo come through here. Collective: every rank calls it at
the same point, and every rank gets the same profile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import trimtab
from trimtab.cluster.profile import PROFILE_VERSION, CollectiveTime, DeviceProfile, Profile
from trimtab.measure.cache import ProbeCache
from trimtab.measure.device import DeviceProbe, Task, called
from trimtab.measure.links import ROWS, LinkProbe, link_times, own_rows
from trimtab.measure.reductions import Unhidden, slower_gathers
from trimtab.predict.links import COLLECTIVES, Collective, Placement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.workload import Workload

LINK_ROUNDS, REDUCTION_ROUNDS = 4, 4

MOST_TRIED = 64 << 20
"""Bytes of a model's buckets that are sent on trial: a slow link would take minutes for all of a large one."""


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What a job found out about itself."""

    profile: Profile
    workload: Workload
    """At the batch of the task's model."""

    left: tuple[str, ...]
    """What this rank had too little time for."""


def probe_job(
    task: Task,
    device: torch.device,
    names: Sequence[str],
    placement: Placement,
    link: str,
    *,
    cache: ProbeCache | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Probed:
    """The profile of the job that this rank is in.

    Args:
        names: the device class of every rank. What its first rank measured stands for a class.
        placement: how the ranks sit on hosts.
        link: the class of what joins them, `LOCAL` for whatever there is.
        cache: what this rank measured before; nothing is kept when absent.
    """
    steps = LINK_ROUNDS + (REDUCTION_ROUNDS if task.bits else 0) if len(names) > 1 else 0
    shown = _Progress(progress, steps)
    if cache is None:
        cache = ProbeCache(called(device), "", torch="", trimtab="", keep=False)
    trial = DeviceProbe(task, device, cache)
    own, left = trial.run(shown.move)
    everyone: list[Any] = [None] * len(names)
    dist.all_gather_object(everyone, own)
    devices: dict[str, DeviceProfile] = {}
    for name, found in zip(names, everyone, strict=True):
        devices.setdefault(name, found)
    profile = Profile(
        version=PROFILE_VERSION, trimtab=trimtab.__version__, torch=torch.__version__, devices=devices
    )
    if len(names) > 1:
        measured = _links(trial.workload, task.bits, device, names, placement, shown)
        profile = replace(profile, links={link: measured})
        bits = [b for b in task.bits if all(str(b) in of_rank.codec for of_rank in devices.values())]
        if bits:
            beyond = Unhidden(trial.workload, bits, placement, device, most=MOST_TRIED)
            for _ in range(REDUCTION_ROUNDS):
                beyond.round()
                shown.one()
            profile = slower_gathers(profile, link, beyond.seconds(profile, link, names))
            beyond.close()
    return Probed(profile=profile, workload=trial.workload, left=tuple(left))


def _links(
    workload: Workload,
    bits: Sequence[int],
    device: torch.device,
    names: Sequence[str],
    placement: Placement,
    shown: _Progress,
) -> dict[str, CollectiveTime]:
    rows: dict[Collective, Any] = dict.fromkeys(COLLECTIVES, ROWS)
    trial = LinkProbe(placement, device, rows=rows | own_rows(workload, bits, MOST_TRIED))
    for _ in range(LINK_ROUNDS):
        trial.round()
        shown.one()
    return link_times(trial, names)


class _Progress:
    """Counts on after the devices are done."""

    def __init__(self, progress: Callable[[int, int], None], after: int) -> None:
        self._progress, self._after = progress, after
        self._done, self._total = 0, after

    def move(self, done: int, total: int) -> None:
        self._done, self._total = done, total + self._after
        self._progress(self._done, self._total)

    def one(self) -> None:
        self._done += 1
        self._progress(min(self._done, self._total), self._total)
