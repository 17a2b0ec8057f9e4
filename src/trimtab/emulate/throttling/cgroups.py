"""Control groups, version 1 or 2, whichever is mounted with the required controller."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trimtab.emulate.job_directory import Job
from trimtab.errors import TrimtabError


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
