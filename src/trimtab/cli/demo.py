"""`trimtab demo`: an uneven cluster on this machine, and how trimtab adapts to it."""

from __future__ import annotations

from pathlib import Path

from trimtab.cluster import Cluster
from trimtab.errors import TrimtabError

TENSOR_SPEED = 0.5
"""Speed of the second rank of the tensor-parallel job."""


def demo() -> None:
    """All of it, in about two minutes, on the machine at hand."""
    folder = _data_parallel()
    _tensor_parallel()
    _report(folder)
    print("Every figure was measured in this run. For more: trimtab bench --help, and docs/.")


def _data_parallel() -> Path:
    from trimtab.bench.ranks import run_on_ranks
    from trimtab.bench.scenarios import demo as scenario
    from trimtab.cli.terminal import print_table, progress_bar
    from trimtab.emulate import Emulation
    from trimtab.report.run_info import new_run_folder

    folder = new_run_folder("demo")
    cluster, shaped = scenario.cluster(shaped=True), True
    try:
        emulation = Emulation(cluster).__enter__()
    except TrimtabError as error:
        print(f"Links cannot be shaped here, so the hosts are joined at this machine's own speed:\n  {error}")
        cluster, shaped = scenario.cluster(shaped=False), False
        emulation = Emulation(cluster).__enter__()
    with emulation, progress_bar("data parallel") as progress:
        print(_described(cluster))
        measured = run_on_ranks(
            emulation, scenario.on_rank, {"shaped": shaped, "run_dir": str(folder)}, progress=progress
        )
    print_table(measured["title"], measured["rows"])
    for what, explanation in measured["explained"].items():
        print(f"{what}: {explanation}")
    print()
    return folder


def _report(folder: Path) -> None:
    """The page of the recorded steps; without one where the current folder cannot be written to."""
    from trimtab.cli.report import report

    try:
        report([folder])
    except TrimtabError as error:
        print(f"There is no report: {error}")


def _tensor_parallel() -> None:
    from trimtab.bench.scenarios.tp import tp
    from trimtab.cli.terminal import print_table, progress_bar

    print(f"Tensor parallel: every layer over two ranks, the second at speed {TENSOR_SPEED:g}:")
    with progress_bar("tensor parallel") as progress:
        rows = {row["method"]: row for row in tp.run_at(TENSOR_SPEED, "cpu", 3, progress)}
    shown = {"even": "even", "shares": "trimtab.tensor_parallel", "ideal": "ideal"}
    table = [
        {
            "method": name,
            "step_ms": rows[method]["step_ms"],
            "over_even": rows["even"]["step_ms"] / rows[method]["step_ms"],
            "loss": rows[method]["loss"],
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
