"""Running a bench's rank function on every rank of an emulated cluster.

The launcher starts `python -m trimtab.bench.ranks` on each rank; it calls the named function with
the spec, and rank 0 hands the function's result back through a file.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trimtab.cluster import Cluster
    from trimtab.emulate import Emulation


_QUIET = {"TRIMTAB_LOG": "warning", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def run_on_ranks(
    emulation: Emulation,
    function: Callable[..., Any],
    spec: Mapping[str, Any],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Call `function(spec, report)` on every rank of a running emulation; gives rank 0's JSON result.

    `function` is a module-level function; on its rank, torch.distributed is initialised.
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


def _watch(path: Path, progress: Callable[[int, int], None] | None, stop: threading.Event) -> None:
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

    job = Path(sys.argv[1])
    task = json.loads(job.read_text())
    module, name = task["function"].split(":")
    device = task["spec"].get("device", "cpu")
    if device == "cuda":
        from trimtab.emulate.mps import check_products

        torch.cuda.set_device(0)
        check_products()
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()

    def report(done: int, total: int) -> None:
        if rank == 0:
            # Replaced as a whole, so that the reader never sees half a line.
            part = job.with_name("progress.part")
            part.write_text(f"{done} {total}")
            part.replace(job.with_name("progress"))

    result = getattr(import_module(module), name)(task["spec"], report)
    if rank == 0:
        job.with_name("result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def wire_bytes() -> int:
    """Bytes this rank's network interface has sent so far; on a shared one, divided by its users.

    Reads the kernel's counter, so protocol overhead is in it.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME") or "lo"
    # Not /sys/class/net: that shows the interfaces of whoever mounted it, not those of this namespace.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        interface, _, counters = line.partition(":")
        if interface.strip() == name:
            return int(counters.split()[8]) // (int(os.environ["WORLD_SIZE"]) if name == "lo" else 1)
    raise TrimtabError(f"bench: there is no network interface {name!r} here")


def two_hosts(link: str | None, per_host: int = 1) -> Cluster:
    """Two hosts of one rank each, or more, at a given link rate (`parse_rate`), or unshaped."""
    from trimtab.cluster import Cluster, Device, Host, Link

    rate = parse_rate(link) if link else None
    hosts = tuple(Host(name=name, devices={"cpu": per_host}, link="link" if rate else None) for name in "ab")
    return Cluster(
        version=1,
        devices={"cpu": Device(kind="cpu", speed=1.0)},
        links={"link": Link(gbit_per_s=rate)} if rate else {},
        hosts=hosts,
    )


def slices(count: int) -> Cluster:
    """One GPU as `count` equal ones, each looking like a host of its own."""
    from trimtab.cluster import Cluster, Device, Host

    hosts = tuple(Host(name=f"gpu{i}", devices={"slice": 1}) for i in range(count))
    return Cluster(version=1, devices={"slice": Device(kind="cuda", speed=1.0)}, hosts=hosts)


def parse_rate(text: str) -> float:
    """Gbit/s from `1gbit`, `100mbit`, `2.5gbit`."""
    for unit, factor in (("gbit", 1.0), ("mbit", 1e-3)):
        if text.lower().endswith(unit):
            try:
                rate = float(text[: -len(unit)]) * factor
            except ValueError:
                break
            if rate > 0:
                return rate
    raise TrimtabError(f"{text!r} is no link rate; write it as 1gbit, 100mbit or none")


if __name__ == "__main__":
    main()
