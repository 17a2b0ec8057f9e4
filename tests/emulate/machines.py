"""Clusters to emulate in tests, and what is left of an emulation outside its directory."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.cluster import Cluster, Device, Host, Link
from trimtab.emulate.cleanup import marked
from trimtab.emulate.job_directory import jobs_home, recorded

if TYPE_CHECKING:
    from collections.abc import Callable


def pair(
    *,
    speed: float = 1.0,
    gbit_per_s: float | None = None,
    latency_us: float | None = None,
    memory_gib: float | None = None,
) -> Cluster:
    """Hosts a and b with one CPU rank each; b has the given speed and memory."""
    link = None if gbit_per_s is None else "link"
    return Cluster(
        version=1,
        devices={
            "one": Device(kind="cpu", speed=1.0),
            "two": Device(kind="cpu", speed=speed, memory_gib=memory_gib),
        },
        links={} if gbit_per_s is None else {"link": Link(gbit_per_s=gbit_per_s, latency_us=latency_us)},
        hosts=(
            Host(name="a", devices={"one": 1}, link=link),
            Host(name="b", devices={"two": 1}, link=link),
        ),
    )


def jobs_of(launcher: int) -> list[Path]:
    """The directories of the jobs that a process launched."""
    return [path for path in jobs_home().iterdir() if path.name.startswith(f"{launcher}-")]


def traces(job: Path, resources: list[tuple[str, str]]) -> list[str]:
    """What still stands of a job that once held those resources."""
    leftovers = [f"process {pid}" for pid in marked(job)]
    leftovers += [
        f"namespace {value}" for kind, value in resources if kind == "netns" and _is_namespace(value)
    ]
    leftovers += [f"group {value}" for kind, value in resources if kind == "cgroup" and Path(value).exists()]
    return leftovers + ([f"directory {job}"] if job.exists() else [])


def resources_of(job: Path) -> list[tuple[str, str]]:
    """The resources of a job, of which each now exists."""
    resources = recorded(job)
    assert resources
    assert all(_is_namespace(value) for kind, value in resources if kind == "netns")
    assert all(Path(value).is_dir() for kind, value in resources if kind == "cgroup")
    return resources


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition that has to come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def _is_namespace(name: str) -> bool:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return name in listed.split()
