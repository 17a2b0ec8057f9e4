"""Control groups, version 1 or 2, whichever is mounted with the required controller: a rank's CPU time and memory.

A quota limits CPU time in every short period, not speed: it is accurate for steps much longer than the period.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trimtab.emulate.job_directory import Job
from trimtab.emulate.placement import Placement
from trimtab.errors import TrimtabError

# Short, since a step stalls for up to a period; the kernel accepts no quota below 1 ms.
_PERIOD_US = 5_000
_MIN_QUOTA_US = 1_000
_MAX_PERIOD_US = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Group:
    """One control group of one controller."""

    path: Path
    version: int

    def write(self, name: str, value: str | int) -> None:
        (self.path / name).write_text(str(value))

    def read(self, name: str) -> str:
        return (self.path / name).read_text()

    def join(self) -> None:
        """Move the calling process, with all its threads, into the group."""
        self.write("cgroup.procs", os.getpid())


def create_group(job: Job, controller: str, name: str) -> Group:
    """Create a group for one rank of the job.

    Raises:
        TrimtabError: this process cannot create groups of that controller.
    """
    if os.geteuid() != 0:
        raise TrimtabError(f"emulate: {controller} control groups need root: run as root")
    parent, version = _parent(controller)
    own = parent / f"trimtab-{job.name}"
    group = own / name
    try:
        if not own.exists():
            job.record("cgroup", own)
            own.mkdir()
        if version == 2:
            (own / "cgroup.subtree_control").write_text(f"+{controller}")
        group.mkdir(exist_ok=True)
    except OSError as error:
        raise TrimtabError(
            f"emulate: cannot create the {controller} control group {group}: {error.strerror}; "
            "mount the cgroup filesystem writable (in a container: run it privileged)"
        ) from None
    return Group(path=group, version=version)


def _parent(controller: str) -> tuple[Path, int]:
    """The directory in which groups of the controller can be created, and its version."""
    unified = None
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        if kind == "cgroup" and controller in options.split(","):
            # Inside our own group, so that its limits apply to the ranks too.
            own = Path(mount + _own_group(controller))
            return (own if own.is_dir() else Path(mount)), 1
        if kind == "cgroup2":
            unified = Path(mount)
    if unified is None or controller not in (unified / "cgroup.controllers").read_text().split():
        raise TrimtabError(
            f"emulate: no cgroup filesystem with the {controller} controller is mounted; mount it at /sys/fs/cgroup"
        )
    # In version 2 a group with processes, such as ours, cannot have controlled children: so at the top.
    control = unified / "cgroup.subtree_control"
    try:
        if controller not in control.read_text().split():
            control.write_text(f"+{controller}")
    except OSError as error:
        raise TrimtabError(
            f"emulate: cannot enable the {controller} controller in {control}: {error.strerror}; "
            "enable it there, or run outside the container"
        ) from None
    return unified, 2


def _own_group(controller: str) -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return "/"


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


def limit_memory(job: Job, placement: Placement) -> Group:
    """Create a group with the rank's `memory_gib`; the kernel kills a rank that exceeds it."""
    assert placement.memory_gib is not None
    try:
        group = create_group(job, "memory", f"rank-{placement.rank}")
    except TrimtabError as error:
        raise TrimtabError(
            f"{error}, or remove memory_gib from device class {placement.device!r} to run without a limit"
        ) from None
    size = int(placement.memory_gib * (1 << 30))
    if group.version == 2:
        group.write("memory.max", size)
        if (group.path / "memory.swap.max").exists():
            group.write("memory.swap.max", 0)
    else:
        group.write("memory.limit_in_bytes", size)
        if (group.path / "memory.memsw.limit_in_bytes").exists():
            group.write("memory.memsw.limit_in_bytes", size)
    return group


def kills(group: Group) -> int:
    """How many processes of the group the kernel killed for lack of memory."""
    events = group.read("memory.events" if group.version == 2 else "memory.oom_control")
    counts = dict(line.split() for line in events.splitlines())
    return int(counts.get("oom_kill", 0))
