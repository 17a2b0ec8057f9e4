"""One NVIDIA GPU as several unequal ones: the Multi-Process Service (MPS) gives each rank a part of it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import log
from pathlib import Path

from trimtab import environment
from trimtab.emulate.job_directory import Job
from trimtab.emulate.placement import Placement
from trimtab.errors import TrimtabError

PROCESSES = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
_MIB_PER_GIB = 1024

PARTS = tuple(count / 132 for count in (132, 128, 124, 120, 66, 64, 62, 34, 32, 30, 22, 18, 16, 14))
"""The parts of a GPU that a rank may have.

On other parts of an H200 (132 multiprocessors) cuBLAS silently skips tiles of bf16 products; fp32 training went wrong
there too. `trimtab.measure.products` detects this, and every rank checks it before its script runs.
"""


@dataclass(frozen=True, kw_only=True)
class Share:
    """A rank's part of a GPU."""

    gpu: str
    percentage: float
    memory_fraction: float | None


WORK_QUEUES = 8
"""Of a rank, as every process has on a GPU of its own. MPS gives its clients two: then kernels of unrelated streams
wait for each other, and what should overlap with computing does not. Clients share a pool of them: 32 for each of four
ranks on an H200 are refused as out of memory."""

_TOLERANCE = log(1.07)
"""Among speeds this close to the requested ones larger parts are preferred, because they measure more accurately."""


def require() -> None:
    """Raise if GPUs cannot be shared on this machine."""
    for tool in ("nvidia-smi", "nvidia-cuda-mps-control"):
        if shutil.which(tool) is None:
            raise TrimtabError(
                f"emulate: a device of kind cuda needs an NVIDIA GPU and the program `{tool}`: "
                "install the NVIDIA driver with its tools, or use devices of kind cpu"
            )


def share_out(placements: Sequence[Placement], gpus: Sequence[tuple[str, float]]) -> dict[int, Share]:
    """Divide the GPUs, given by id and GiB, among the CUDA ranks, with the parts from `PARTS` closest to their speeds.

    Ranks are assigned to GPUs cyclically; speeds keep their ratio across GPUs.
    """
    cuda_ranks = [placement for placement in placements if placement.kind == "cuda"]
    placed = {placement.rank: index % len(gpus) for index, placement in enumerate(cuda_ranks)}
    memory = [0.0] * len(gpus)
    for placement in cuda_ranks:
        memory[placed[placement.rank]] += placement.memory_gib or 0.0
    for (gpu, size), requested in zip(gpus, memory, strict=True):
        if requested > size:
            raise TrimtabError(
                f"emulate: the ranks on GPU {gpu} need {requested:g} GiB and it has {size:.1f}; "
                "lower memory_gib or use fewer ranks"
            )
    parts = _parts(
        [placement.speed for placement in cuda_ranks], [placed[placement.rank] for placement in cuda_ranks]
    )
    return {
        placement.rank: Share(
            gpu=gpus[placed[placement.rank]][0],
            # A little more than the part, because MPS rounds down to pairs of multiprocessors.
            percentage=min(100.0, 100 * part + 0.4),
            memory_fraction=None
            if placement.memory_gib is None
            else placement.memory_gib / gpus[placed[placement.rank]][1],
        )
        for placement, part in zip(cuda_ranks, parts, strict=True)
    }


def _parts(speeds: Sequence[float], placed: Sequence[int]) -> list[float]:
    """A part for each speed, at most all of each GPU: the largest parts whose ratios are close to the speeds'."""
    fastest = max(speeds)
    best: tuple[float, float, list[float]] | None = None
    for largest in PARTS:
        targets = [largest * speed / fastest for speed in speeds]
        parts = [min(PARTS, key=lambda part, target=target: abs(log(part / target))) for target in targets]  # type: ignore[misc]
        if max(sum(p for p, gpu in zip(parts, placed, strict=True) if gpu == one) for one in placed) > 1:
            continue
        error = max(abs(log(part / target)) for part, target in zip(parts, targets, strict=True))
        score = max(error, _TOLERANCE), -sum(parts)
        if best is None or score < best[:2]:
            best = *score, parts
    if best is None:
        raise TrimtabError(
            f"emulate: speeds {', '.join(f'{speed:g}' for speed in speeds)} do not fit on the GPUs of this machine: "
            f"a rank needs at least {min(PARTS):.0%} of one; use fewer ranks or less uneven speeds"
        )
    if best[0] > _TOLERANCE:
        speeds_used = ", ".join(f"{part / max(best[2]):.2f}" for part in best[2])
        environment.logger().warning(
            "emulate: parts of a GPU come in fixed sizes (see docs/emulate.md); using relative speeds %s",
            speeds_used,
        )
    return best[2]


def visible_gpus() -> list[tuple[str, float]]:
    """Id and GiB of each GPU that this process may use."""
    query = subprocess.run(
        ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
    )
    if query.returncode != 0 or not query.stdout.strip():
        message = " ".join((query.stderr or query.stdout).split())
        raise TrimtabError(f"emulate: a device of kind cuda needs an NVIDIA GPU; nvidia-smi says: {message}")
    rows = [[field.strip() for field in line.split(",")] for line in query.stdout.strip().splitlines()]
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = None if allowed is None else [name.strip() for name in allowed.split(",") if name.strip()]
    gpus = [
        (uuid, float(size) / _MIB_PER_GIB)
        for index, uuid, size in rows
        if chosen is None or index in chosen or any(uuid.startswith(name) for name in chosen)
    ]
    if not gpus:
        raise TrimtabError(f"emulate: CUDA_VISIBLE_DEVICES={allowed!r} leaves no GPU; unset it")
    return gpus


def start(job: Job) -> dict[str, str]:
    """Start an MPS daemon for this job; returns the environment of its clients."""
    home = job.path / "mps"
    env = _environment(home)
    for folder in env.values():
        os.makedirs(folder)  # noqa: PTH103 - the value is the environment's text
    job.record("mps", home)
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        done = subprocess.run(
            [PROCESSES[0], "-d"],
            env={**inherited, **env, **job.marked},
            capture_output=True,
            timeout=30,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TrimtabError("emulate: nvidia-cuda-mps-control did not start in 30 s; see nvidia-smi") from None
    if done.returncode != 0:
        message = " ".join((done.stderr or done.stdout).decode(errors="replace").split())
        raise TrimtabError(f"emulate: nvidia-cuda-mps-control did not start: {message}")
    return env


def stop(home: Path) -> None:
    """Stop the MPS daemon of a job, if it is running."""
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
    """The environment with which a rank sees its part of the GPU, and NCCL treats it as a host of its own."""
    return {
        "CUDA_VISIBLE_DEVICES": share.gpu,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{share.percentage:.1f}",
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", str(WORK_QUEUES)),
        "NCCL_HOSTID": f"trimtab-{rank}",
        "NCCL_SOCKET_IFNAME": interface,
        "NCCL_IB_DISABLE": "1",
    }


def _environment(home: Path) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(home / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(home / "log")}
