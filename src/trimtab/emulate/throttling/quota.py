"""Speed by quota: a control group limits a rank's CPU time in every short period.

A quota limits CPU time, not speed: it is accurate for steps much longer than the period.
"""

from __future__ import annotations

from trimtab.emulate.job_directory import Job
from trimtab.emulate.placement import Placement
from trimtab.emulate.throttling.cgroups import Group, create_group

# Short, since a step stalls for up to a period; the kernel accepts no quota below 1 ms.
_PERIOD_US = 5_000
_MIN_QUOTA_US = 1_000
_MAX_PERIOD_US = 1_000_000


def create_quota(job: Job, placement: Placement) -> Group:
    """Create a group in which the rank runs at its speed."""
    group = create_group(job, "cpu", f"rank-{placement.rank}")
    set_quota(group, cpus(placement.speed, len(placement.cores), placement.sharing), len(placement.cores))
    return group


def cpus(speed: float, cores: int, sharing: int) -> float:
    """The number of CPUs whose time a rank of that speed may use."""
    return speed * cores / sharing


def set_quota(group: Group, cpus: float, cores: int) -> None:
    """Limit the group to the time of `cpus` CPUs; no limit if that is at least its number of cores."""
    period = min(_MAX_PERIOD_US, max(_PERIOD_US, int(_MIN_QUOTA_US / cpus)))
    quota = max(_MIN_QUOTA_US, round(cpus * period))
    unlimited = cpus >= cores
    if group.version == 2:
        group.write("cpu.max", "max" if unlimited else f"{quota} {period}")
        return
    group.write("cpu.cfs_quota_us", -1)
    if not unlimited:
        group.write("cpu.cfs_period_us", period)
        group.write("cpu.cfs_quota_us", quota)
