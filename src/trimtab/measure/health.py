"""What a machine and a group of ranks can do with trimtab: the checks behind `trimtab doctor`.

Every check returns findings: what there is, what that means for trimtab, and what to change.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import trimtab
from trimtab import environment
from trimtab.codec.native import NativeKernels
from trimtab.collectives.shared_segment import FOLDER
from trimtab.errors import TrimtabError
from trimtab.measure.device import called
from trimtab.measure.out_of_memory import available_bytes
from trimtab.measure.products import describe_gpu, is_hopeless, is_part_of_gpu, wrong_product
from trimtab.measure.timing import repeated_seconds
from trimtab.precision.devices import offers

OLDEST_TORCH = (2, 11)
LEAST_SHARED_BYTES = 64 << 20
"""Docker's default for /dev/shm: too little for the gradients of most models."""

LATENCY_BYTES, BANDWIDTH_BYTES = 64, 4 << 20
FAST_LINK_GBIT_PER_S = 10
"""Between CPU hosts compression gains nothing beyond it (docs/benchmarks.md)."""

Status = Literal["ok", "limited", "broken"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status
    """limited: trimtab works, with something missing or slow. broken: something that it needs does not work."""

    found: str
    means: str
    """What trimtab can and cannot do there."""

    change: str | None = None
    """What to change; None if nothing."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank is, and its findings."""

    rank: int
    host: str
    versions: dict[str, str]
    findings: list[Finding]

    def as_tree(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> RankReport:
        return cls(**{**tree, "findings": [Finding(**finding) for finding in tree["findings"]]})


def examine_rank(more: Sequence[Callable[[], Iterator[Finding]]] = ()) -> RankReport:
    """All checks of this process and its machine. A check that fails unexpectedly is a finding, not an error."""
    findings: list[Finding] = []
    for check in (
        _versions,
        _kernels,
        _backends,
        _shared_memory,
        _cache,
        _processor,
        _gpus,
        _switches,
        *more,
    ):
        try:
            findings += check()
        except Exception as error:
            name = check.__name__.strip("_").replace("_", " ")
            text = f"{type(error).__name__}: {error}"
            findings.append(
                Finding(
                    check=name, status="broken", found=text, means="this check failed", change="report this"
                )
            )
    return RankReport(
        rank=int(os.environ.get("RANK", "0")),
        host=socket.gethostname(),
        versions=versions(),
        findings=findings,
    )


def versions() -> dict[str, str]:
    return {
        "trimtab": trimtab.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _versions() -> Iterator[Finding]:
    found = ", ".join(f"{name} {version}" for name, version in versions().items())
    old = tuple(int(part) for part in str(torch.__version__).split(".")[:2]) < OLDEST_TORCH
    yield Finding(
        check="versions",
        status="broken" if old else "ok",
        found=f"{found}, {platform.system()} {platform.machine()}",
        means="this torch is too old for trimtab" if old else "supported",
        change=f"install torch {'.'.join(map(str, OLDEST_TORCH))} or newer" if old else None,
    )


def _kernels() -> Iterator[Finding]:
    try:
        best = NativeKernels().instruction_set
        slow = best == "portable"
        yield Finding(
            check="CPU kernels",
            status="limited" if slow else "ok",
            found=f"C++, {best}",
            means="compression on this CPU is slow" if slow else "fast compression of CPU tensors",
            change="use a processor with AVX2 or AVX-512" if slow else None,
        )
    except TrimtabError as error:
        yield Finding(
            check="CPU kernels",
            status="limited",
            found="falls back to the PyTorch reference",
            means="compression of CPU tensors works, but rarely pays; no shared memory inside a host",
            change=str(error),
        )
    if torch.cuda.is_available():
        triton = find_spec("triton") is not None
        yield Finding(
            check="GPU kernels",
            status="ok" if triton else "limited",
            found="Triton" if triton else "no Triton: falls back to the PyTorch reference",
            means="fast compression and int8 of CUDA tensors" if triton else "compression on the GPU is slow",
            change=None if triton else "pip install triton",
        )


def _backends() -> Iterator[Finding]:
    if not dist.is_available():
        yield Finding(
            check="backends",
            status="broken",
            found="torch was built without torch.distributed",
            means="no job of several ranks can run",
            change="install a torch with distributed support",
        )
        return
    has = {"Gloo": dist.is_gloo_available(), "NCCL": dist.is_nccl_available()}
    gpu_without_nccl = torch.cuda.is_available() and not has["NCCL"]
    change = "install a torch built with Gloo" if not has["Gloo"] else "install a torch built with NCCL"
    yield Finding(
        check="backends",
        status="ok" if has["Gloo"] and not gpu_without_nccl else "limited" if has["Gloo"] else "broken",
        found=", ".join(name for name, there in has.items() if there) or "none",
        means="CPU and GPU jobs" if all(has.values()) else "CPU jobs" if has["Gloo"] else "no CPU jobs",
        change=change if gpu_without_nccl or not has["Gloo"] else None,
    )


def _shared_memory() -> Iterator[Finding]:
    try:
        with tempfile.TemporaryFile(dir=FOLDER):
            free = shutil.disk_usage(FOLDER).free
    except OSError as error:
        yield Finding(
            check="shared memory",
            status="limited",
            found=f"{FOLDER}: {error.strerror}",
            means="ranks of one host exchange through sockets",
            change=f"mount a tmpfs at {FOLDER} that this user may write",
        )
        return
    small = free < LEAST_SHARED_BYTES
    yield Finding(
        check="shared memory",
        status="limited" if small else "ok",
        found=f"{FOLDER}: {_size(free)} free",
        means="too small for most models: ranks of one host exchange through sockets"
        if small
        else "ranks of one host exchange through it",
        change="enlarge it (docker run --shm-size=8g)" if small else None,
    )


def _cache() -> Iterator[Finding]:
    folder = environment.cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield Finding(
            check="cache",
            status="limited",
            found=f"{folder}: {error.strerror}",
            means="measurements and decisions are not kept between runs",
            change="make it writable, or set XDG_CACHE_HOME",
        )
        return
    yield Finding(check="cache", status="ok", found=str(folder), means="measurements are kept between runs")


def _processor() -> Iterator[Finding]:
    device = torch.device("cpu")
    offered = offers(device)["linear"]
    slow = [name for name in offered if is_hopeless(name, device)]
    useful = [name for name in offered if name not in slow]
    yield Finding(
        check="processor",
        status="limited" if slow else "ok",
        found=f"{called(device)}, {len(os.sched_getaffinity(0))} cores, {_size(available_bytes())} of memory free",
        means=f"precisions: {', '.join(useful)}"
        + (f"; far slower than fp32, so never chosen: {', '.join(slow)}" if slow else ""),
        change=f"do not use autocast with {' or '.join(slow)} on this CPU" if slow else None,
    )


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
        yield Finding(
            check="GPU",
            status="limited" if driver else "ok",
            found="a driver, but torch finds no GPU" if driver else "none",
            means="CPU jobs only",
            change="install a torch built for this driver's CUDA; see nvidia-smi" if driver else None,
        )
        return
    for index in range(torch.cuda.device_count()):
        problem = wrong_product(torch.device("cuda", index))
        free, _total = torch.cuda.mem_get_info(index)
        precisions = ", ".join(offers(torch.device("cuda", index))["linear"])
        yield Finding(
            check=f"GPU {index}",
            status="ok" if problem is None else "broken",
            found=f"{describe_gpu(index)}, {_size(free)} free{', shared by MPS' if is_part_of_gpu() else ''}",
            means=f"products are right; precisions: {precisions}"
            if problem is None
            else f"products are wrong: {problem}; trimtab refuses to train here",
            change=None if problem is None else "use a whole GPU, or about 1/2, 1/4, 1/6 or 1/8 of one",
        )


def _switches() -> Iterator[Finding]:
    if environment.disabled():
        yield Finding(
            check="environment",
            status="limited",
            found="TRIMTAB_DISABLE is set",
            means="trimtab adjusts nothing",
            change="unset TRIMTAB_DISABLE",
        )


def compare_versions(reports: Sequence[RankReport]) -> Finding:
    """Whether all ranks run the same software; ranks that differ from rank 0 are named."""
    names = ("trimtab", "torch", "python")
    first = reports[0].versions
    differing = {
        name: [
            f"rank {report.rank} ({report.host}) has {report.versions.get(name)}"
            for report in reports
            if report.versions.get(name) != first.get(name)
        ]
        for name in names
    }
    words = [
        f"{name}: rank 0 has {first.get(name)}, {', '.join(several)}"
        for name, several in differing.items()
        if several
    ]
    if not words:
        return Finding(
            check="same versions",
            status="ok",
            found=f"{len(reports)} ranks, all alike",
            means="the ranks can work together",
        )
    harmful = bool(differing["trimtab"] or differing["torch"])
    return Finding(
        check="same versions",
        status="broken" if harmful else "limited",
        found="; ".join(words),
        means="ranks may decide or encode differently, and hang or train wrongly"
        if harmful
        else "usually harmless",
        change="install the same versions on every host",
    )


def measure_link(hosts: int) -> Finding:
    """A quick look at the link between the ranks. Collective."""
    device = torch.device("cuda", torch.cuda.current_device()) if _on_gpu() else torch.device("cpu")
    world = dist.get_world_size()

    def seconds(nbytes: int) -> float:
        buffer = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
        return repeated_seconds(lambda: dist.all_reduce(buffer), device, repeats=5)

    latency = seconds(LATENCY_BYTES)
    gbit_per_s = BANDWIDTH_BYTES * 8 * 2 * (world - 1) / world / seconds(BANDWIDTH_BYTES) / 1e9
    slow = hosts > 1 and gbit_per_s < FAST_LINK_GBIT_PER_S
    where = f"{world} ranks on {hosts} host{'s' if hosts > 1 else ''}"
    return Finding(
        check="link",
        status="ok",
        found=f"{where}, {dist.get_backend()}: {gbit_per_s:.2g} Gbit/s, {latency * 1e6:.0f} us",
        means="slow enough for fewer bits to pay; `trimtab run` measures it with the model"
        if slow
        else "a fast link: fewer bits rarely pay",
    )


def _on_gpu() -> bool:
    return dist.get_backend() == "nccl"


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
