"""The memory limit of a CPU rank, by a control group."""

from __future__ import annotations

from trimtab.emulate.job_directory import Job
from trimtab.emulate.placement import Placement
from trimtab.emulate.throttling.cgroups import Group, create_group
from trimtab.errors import TrimtabError

_GIB = 1 << 30


def limit_memory(job: Job, placement: Placement) -> Group:
    """Create a group with the rank's `memory_gib`; the kernel kills a rank that exceeds it."""
    assert placement.memory_gib is not None
    try:
        group = create_group(job, "memory", f"rank-{placement.rank}")
    except TrimtabError as error:
        raise TrimtabError(
            f"{error}, or remove memory_gib from device class {placement.device!r} to run without a limit"
        ) from None
    size = int(placement.memory_gib * _GIB)
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
