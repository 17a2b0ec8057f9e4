"""`trimtab demo`: an uneven cluster on the machine at hand, and what trimtab makes of it."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

from trimtab.bench.ranks import run_on_ranks, wire_bytes
from trimtab.cluster import Cluster, Device, Host, Link
from trimtab.errors import TrimtabError
from trimtab.report.terminal import print_table, progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STEPS = 12
"""Steps of each method, the first two of which are not counted."""

METHODS = ("plain DDP", "trimtab", "no communication")


def demo() -> None:
    """Train a GPT on two unequal emulated hosts: plain DDP, and with one line of trimtab."""
    from trimtab.emulate import Emulation

    cluster = _cluster(shaped=True)
    try:
        emulation = Emulation(cluster).__enter__()
    except TrimtabError as error:
        print(f"Links cannot be shaped here, so the hosts share this machine's own speed:\n  {error}")
        cluster = _cluster(shaped=False)
        emulation = Emulation(cluster).__enter__()
    with emulation, progress_bar("training") as progress:
        print(_described(cluster))
        measured = run_on_ranks(emulation, on_rank, {"steps": STEPS}, progress=progress)
    print_table("A GPT of 5 million parameters, 512 bytes a rank and step", measured["rows"])
    print(f"trimtab: {measured['explain']}")
    print("Every figure is of this run. For more: trimtab bench ddp, trimtab bench loss, trimtab --help.")


def _cluster(*, shaped: bool) -> Cluster:
    link = "office" if shaped else None
    return Cluster(
        version=1,
        devices={"fast": Device(kind="cpu", speed=1.0), "slow": Device(kind="cpu", speed=0.6)},
        links={"office": Link(gbit_per_s=0.2)} if shaped else {},
        hosts=(
            Host(name="a", devices={"fast": 1}, link=link),
            Host(name="b", devices={"slow": 1}, link=link),
        ),
    )


def _described(cluster: Cluster) -> str:
    hosts = [
        f"host {name} at speed {cluster.devices[next(iter(host.devices))].speed:g}"
        for name, host in cluster.machines()
    ]
    rates = [f"{link.gbit_per_s * 1e3:.0f} Mbit/s" for link in cluster.links.values()]
    return f"Emulated: {', '.join(hosts)}; between them {rates[0] if rates else 'an unshaped link'}."


def on_rank(spec: Mapping[str, Any], report: Callable[[int, int], None]) -> dict[str, Any]:
    """Every method in turn, step by step, from the same start on the same data."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import trimtab
    from trimtab.bench.models import Gpt

    torch.set_num_threads(1)
    models = {}
    for method in METHODS:
        torch.manual_seed(0)
        models[method] = DistributedDataParallel(Gpt(width=256, layers=6, heads=8, context=128))
    trimtab.compress(models["trimtab"])
    optimizers = {m: torch.optim.AdamW(ddp.parameters(), lr=1e-3) for m, ddp in models.items()}
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    rows: dict[str, dict[str, Any]] = {}
    for step in range(spec["steps"]):
        for method, ddp in models.items():
            sent, start = wire_bytes(), time.perf_counter()
            loss = _train_step(ddp, optimizers[method], step, communicate=method != "no communication")
            times[method].append(time.perf_counter() - start)
            rows[method] = {"loss": loss, "wire_mb_per_step": (wire_bytes() - sent) / 1e6}
        report(step + 1, spec["steps"])
    plain = median(times["plain DDP"][2:])
    table = []
    for method in METHODS:
        seconds = median(times[method][2:])
        table.append(
            {
                "method": method,
                "step_ms": seconds * 1e3,
                "speed_over_ddp": plain / seconds,
                "wire_mb_per_step": rows[method]["wire_mb_per_step"],
                f"loss_at_step_{spec['steps']}": rows[method]["loss"]
                if method != "no communication"
                else None,
            }
        )
    return {"rows": table, "explain": trimtab.explain(models["trimtab"])}


def _train_step(ddp: Any, optimizer: Any, step: int, *, communicate: bool) -> float:
    from contextlib import nullcontext

    import torch.distributed as dist

    from trimtab.bench.models import tokens

    with nullcontext() if communicate else ddp.no_sync():
        loss = ddp(tokens(4, 128, seed=0, step=step, rank=dist.get_rank()))
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    return float(loss.detach())
