"""The clusters that benches emulate, and running a bench's rank function on every rank of one.

The launcher starts `python -m trimtab.bench.ranks` on each rank. It calls the named function with
the spec, and rank 0 returns the function's result through a file.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from trimtab.bench.harness import Progress
from trimtab.cluster import Cluster, Device, Host, Link, parse_rate
from trimtab.emulate import Emulation
from trimtab.errors import TrimtabError

_QUIET = {"TRIMTAB_LOG": "warning", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def hosts(
    speeds: Sequence[float],
    device: str = "cpu",
    *,
    link: str | None = None,
    names: Sequence[str] = "abcdefgh",
    per_host: int | Sequence[int] = 1,
) -> Cluster:
    """A host for each speed.

    Args:
        device: `cpu`, or `cuda` for parts of one GPU that each look like a host of its own.
        link: the rate of every host's link (`parse_rate`); None or "none" leaves links unshaped.
        per_host: ranks of a host, or of each.
    """
    kind: Any = device
    names = names[: len(speeds)]
    rate = parse_rate(link) if link not in (None, "none") else None
    counts = [per_host] * len(names) if isinstance(per_host, int) else per_host
    # One device class for equal speeds, named after the first host that has it.
    classes = {speed: name for name, speed in reversed(list(zip(names, speeds, strict=True)))}
    return Cluster(
        version=1,
        devices={classes[speed]: Device(kind=kind, speed=speed) for speed in dict.fromkeys(speeds)},
        links={"link": Link(gbit_per_s=rate)} if rate else {},
        hosts=tuple(
            Host(name=name, devices={classes[speed]: ranks}, link="link" if rate else None)
            for name, speed, ranks in zip(names, speeds, counts, strict=True)
        ),
    )


def two_hosts(link: str | None = None, per_host: int = 1) -> Cluster:
    """Two equal hosts."""
    return hosts((1.0, 1.0), link=link, per_host=per_host)


def one_host(per_host: int = 2) -> Cluster:
    """One host of several ranks."""
    return hosts((1.0,), per_host=per_host)


def slices(count: int) -> Cluster:
    """One GPU as `count` equal ones, each looking like a host of its own."""
    return hosts((1.0,) * count, "cuda", names=[f"gpu{index}" for index in range(count)])


def run_on_cluster(
    cluster: Cluster,
    function: Callable[..., Any],
    spec: Mapping[str, Any],
    progress: Progress | None = None,
    **options: Any,
) -> Any:
    """Emulate a cluster, call `function(spec, report)` on each of its ranks and return rank 0's JSON result.

    Args:
        options: those of `Emulation`.
    """
    with Emulation(cluster, **options) as emulation:
        return run_on_ranks(emulation, function, spec, progress=progress)


def run_on_ranks(
    emulation: Emulation,
    function: Callable[..., Any],
    spec: Mapping[str, Any],
    *,
    progress: Progress | None = None,
) -> Any:
    """Call `function(spec, report)` on every rank of a running emulation and return rank 0's JSON result.

    `function` is defined at the top of a module. On its rank torch.distributed is initialized and torch has one thread.
    """
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as folder:
        job = Path(folder, "job.json")
        target = f"{function.__module__}:{function.__qualname__}"
        job.write_text(json.dumps({"function": target, "spec": dict(spec)}))
        stop = threading.Event()
        watcher = threading.Thread(
            target=_watch, args=(Path(folder, "progress"), progress, stop), daemon=True
        )
        watcher.start()
        try:
            outcome = emulation.run(["-m", "trimtab.bench.ranks", str(job)], env=_QUIET)
        finally:
            stop.set()
            watcher.join()
        if outcome.failure is not None:
            raise TrimtabError(f"bench: {outcome.failure}")
        return json.loads(Path(folder, "result.json").read_text())


def _watch(path: Path, progress: Progress | None, stop: threading.Event) -> None:
    while progress is not None and not stop.wait(0.2):
        try:
            done, total = path.read_text().split()
        except (OSError, ValueError):
            continue
        progress(int(done), int(total))


def main() -> None:
    """What each rank runs."""
    import torch
    import torch.distributed as dist

    faulthandler.enable()  # a rank that dies of a signal says where
    job = Path(sys.argv[1])
    description = json.loads(job.read_text())
    module, name = description["function"].split(":")
    device = description["spec"].get("device", "cpu")
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()

    def report(done: int, total: int) -> None:
        if rank == 0:
            # Replaced as a whole, so that the reader never sees half a line.
            part = job.with_name("progress.part")
            part.write_text(f"{done} {total}")
            part.replace(job.with_name("progress"))

    result = getattr(import_module(module), name)(description["spec"], report)
    if rank == 0:
        job.with_name("result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def wire_bytes() -> int:
    """Bytes that this rank's network interface has sent so far; on a shared one, divided by its users.

    Reads the kernel's counter, which includes protocol overhead.
    """
    import torch.distributed as dist

    name = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME") or "lo"
    # Not /sys/class/net: that shows the interfaces of whoever mounted it, not those of this namespace.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        interface, _, counters = line.partition(":")
        if interface.strip() == name:
            return int(counters.split()[8]) // (dist.get_world_size() if name == "lo" else 1)
    raise TrimtabError(f"bench: this machine has no network interface {name!r}")


if __name__ == "__main__":
    main()
