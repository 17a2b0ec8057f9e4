"""Speed by quota: a control group gives a rank CPU time for a part of every short period.

A quota caps CPU time, not speed: it is right for steps much longer than the period.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.emulate.throttling.cgroups import Group, make_group

if TYPE_CHECKING:
    from trimtab.emulate.job_directory import Job
    from trimtab.emulate.placement import Placement

# Short, since a step stalls in lumps of a period; the kernel takes no quota below 1 ms.
_PERIOD_US = 5_000
_MIN_QUOTA_US = 1_000
_MAX_PERIOD_US = 1_000_000


def make_quota(job: Job, placement: Placement) -> Group:
    """Make the group in which the rank runs at its speed."""
    group = make_group(job, "cpu", f"rank-{placement.rank}")
    set_quota(group, cpus(placement.speed, len(placement.cores), placement.sharing), len(placement.cores))
    return group


def cpus(speed: float, cores: int, sharing: int) -> float:
    """How many CPUs' time a rank of that speed may use."""
    return speed * cores / sharing


def set_quota(group: Group, cpus: float, cores: int) -> None:
    """Let the group use the time of `cpus` CPUs; without a limit where it has no more than its cores."""
    period = min(_MAX_PERIOD_US, max(_PERIOD_US, int(_MIN_QUOTA_US / cpus)))
    quota = max(_MIN_QUOTA_US, round(cpus * period))
    free = cpus >= cores
    if group.version == 2:
        group.write("cpu.max", "max" if free else f"{quota} {period}")
        return
    group.write("cpu.cfs_quota_us", -1)
    if not free:
        group.write("cpu.cfs_period_us", period)
        group.write("cpu.cfs_quota_us", quota)
