"""`trimtab demo`: an uneven cluster on the machine at hand, and what trimtab makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from trimtab.cluster import Cluster

TENSOR_SPEED = 0.5
"""Speed of the second rank of the tensor-parallel job."""


def demo() -> None:
    """All of it, in about two minutes, on the machine at hand."""
    _data_parallel()
    _tensor_parallel()
    print("Every figure is of this run. For more: trimtab bench --help, and docs/.")


def _data_parallel() -> None:
    from trimtab.bench.ranks import run_on_ranks
    from trimtab.bench.scenarios import demo as demo_ranks
    from trimtab.cli.terminal import print_table, progress_bar
    from trimtab.emulate import Emulation

    cluster, shaped = demo_ranks.cluster(shaped=True), True
    try:
        emulation = Emulation(cluster).__enter__()
    except TrimtabError as error:
        print(f"Links cannot be shaped here, so the hosts share this machine's own speed:\n  {error}")
        cluster, shaped = demo_ranks.cluster(shaped=False), False
        emulation = Emulation(cluster).__enter__()
    with emulation, progress_bar("data parallel") as progress:
        print(_described(cluster))
        measured = run_on_ranks(emulation, demo_ranks.on_rank, {"shaped": shaped}, progress=progress)
    print_table(measured["title"], measured["rows"])
    for who, said in measured["said"].items():
        print(f"{who}: {said}")
    print()


def _tensor_parallel() -> None:
    from trimtab.bench.ranks import run_on_ranks
    from trimtab.bench.scenarios import tp
    from trimtab.cli.terminal import print_table, progress_bar
    from trimtab.emulate import Emulation

    print(f"Tensor parallel: every layer over two ranks, the second at speed {TENSOR_SPEED:g}:")
    spec: dict[str, Any] = {"speed": TENSOR_SPEED, "device": "cpu", "repeats": 5, **tp.SIZES["cpu"]}
    with (
        Emulation(tp.two_ranks(TENSOR_SPEED, "cpu"), throttle="gemm") as emulation,
        progress_bar("tensor parallel") as progress,
    ):
        rows = run_on_ranks(emulation, tp.on_rank, spec, progress=progress)
    found = {row["method"]: row for row in rows}
    shown = {"even": "even", "shares": "trimtab.tensor_parallel", "ideal": "ideal"}
    table = [
        {
            "method": name,
            "step_ms": found[method]["step_ms"],
            "over_even": found["even"]["step_ms"] / found[method]["step_ms"],
            "loss": found[method]["loss"],
        }
        for method, name in shown.items()
    ]
    print_table("A GPT split over both", table)


def _described(cluster: Cluster) -> str:
    hosts = [
        f"host {name} at speed {cluster.devices[next(iter(host.devices))].speed:g}"
        for name, host in cluster.machines()
    ]
    rates = [f"{link.gbit_per_s * 1e3:.0f} Mbit/s" for link in cluster.links.values()]
    return f"Emulated: {', '.join(hosts)}; between them {rates[0] if rates else 'an unshaped link'}."
