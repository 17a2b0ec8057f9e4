"""One NVIDIA GPU as several unequal ones: the Multi-Process Service gives each rank a part of it."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trimtab.emulate.job import Job
    from trimtab.emulate.layout import Seat

PROCESSES = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
_GIB = 1024  # in the MiB that nvidia-smi speaks


@dataclass(frozen=True, kw_only=True)
class Share:
    """A rank's part of a GPU."""

    gpu: str
    percentage: float
    memory_fraction: float | None


def require() -> None:
    """Refuse if GPUs cannot be shared here, saying what is missing."""
    for tool in ("nvidia-smi", "nvidia-cuda-mps-control"):
        if shutil.which(tool) is None:
            raise TrimtabError(
                f"emulate: a device of kind cuda needs an NVIDIA GPU and the program `{tool}`: "
                "install the NVIDIA driver with its tools, or use devices of kind cpu"
            )


def share_out(seats: Sequence[Seat], gpus: Sequence[tuple[str, float]]) -> dict[int, Share]:
    """Divide the GPUs, given by id and GiB, among the CUDA ranks: parts in proportion to speed.

    Ranks take the GPUs in turn; the fullest GPU sets the scale, so that speeds keep their
    proportion from one GPU to another.
    """
    takers = [seat for seat in seats if seat.kind == "cuda"]
    placed = {seat.rank: index % len(gpus) for index, seat in enumerate(takers)}
    loads, memory = [0.0] * len(gpus), [0.0] * len(gpus)
    for seat in takers:
        loads[placed[seat.rank]] += seat.speed
        memory[placed[seat.rank]] += seat.memory_gib or 0.0
    for (gpu, size), asked in zip(gpus, memory, strict=True):
        if asked > size:
            raise TrimtabError(
                f"emulate: the ranks on GPU {gpu} ask for {asked:g} GiB in all and it has {size:.1f}; "
                "lower memory_gib or take fewer ranks"
            )
    return {
        seat.rank: Share(
            gpu=gpus[placed[seat.rank]][0],
            percentage=min(100.0, 100 * seat.speed / max(loads)),
            memory_fraction=None if seat.memory_gib is None else seat.memory_gib / gpus[placed[seat.rank]][1],
        )
        for seat in takers
    }


def visible_gpus() -> list[tuple[str, float]]:
    """Id and GiB of each GPU this process may use."""
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode != 0 or not asked.stdout.strip():
        said = " ".join((asked.stderr or asked.stdout).split())
        raise TrimtabError(f"emulate: a device of kind cuda needs an NVIDIA GPU; nvidia-smi says: {said}")
    rows = [[field.strip() for field in line.split(",")] for line in asked.stdout.strip().splitlines()]
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = None if allowed is None else [name.strip() for name in allowed.split(",") if name.strip()]
    found = [
        (uuid, float(size) / _GIB)
        for index, uuid, size in rows
        if chosen is None or index in chosen or any(uuid.startswith(name) for name in chosen)
    ]
    if not found:
        raise TrimtabError(f"emulate: CUDA_VISIBLE_DEVICES={allowed!r} leaves no GPU; unset it")
    return found


def start(job: Job) -> dict[str, str]:
    """Start the service for this job alone; returns the environment of its clients."""
    home = job.path / "mps"
    env = _environment(home)
    for folder in env.values():
        os.makedirs(folder)  # noqa: PTH103 - the value is the environment's text
    job.record("mps", home)
    bare = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        done = subprocess.run(
            [PROCESSES[0], "-d"],
            env={**bare, **env, **job.marked},
            capture_output=True,
            timeout=30,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TrimtabError("emulate: nvidia-cuda-mps-control did not start in 30 s; see nvidia-smi") from None
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).decode(errors="replace").split())
        raise TrimtabError(f"emulate: nvidia-cuda-mps-control did not start: {said}")
    return env


def stop(home: Path) -> None:
    """Ask the service of a job to quit; nothing happens if it runs no more."""
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [PROCESSES[0]],
            input=b"quit\n",
            env={**os.environ, **_environment(home)},
            capture_output=True,
            timeout=10,
            check=False,
        )


def client_environment(share: Share, rank: int, interface: str) -> dict[str, str]:
    """What makes a rank see its part of the GPU, and NCCL take it for a host of its own."""
    return {
        "CUDA_VISIBLE_DEVICES": share.gpu,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{share.percentage:.1f}",
        "NCCL_HOSTID": f"trimtab-{rank}",
        "NCCL_SOCKET_IFNAME": interface,
        "NCCL_IB_DISABLE": "1",
    }


def _environment(home: Path) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(home / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(home / "log")}
