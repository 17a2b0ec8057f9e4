"""`trimtab emulate`: an uneven cluster on one machine."""

from __future__ import annotations

from pathlib import Path  # typer resolves annotations at run time
from typing import Annotated

import typer

from trimtab.errors import TrimtabError


def emulate(
    context: typer.Context,
    cluster: Annotated[Path, typer.Argument(help="Cluster file (.yaml or .json).")],
    throttle: Annotated[
        str, typer.Option(help="How ranks are slowed down: auto, quota, duty, competitor or gemm.")
    ] = "auto",
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            help="Slow a host down for a while: b=0.5@20:60 runs host b at speed 0.5 from step 20 to 60. Repeatable."
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Rendezvous port; by default a free one.")] = None,
    under_run: Annotated[
        bool,
        typer.Option(
            "--run", help="Do what `trimtab run` would; its own options, such as --plan, come before the --."
        ),
    ] = False,
) -> None:
    """Rehearse on one machine: run a script under torchrun on the emulated hosts of a cluster file.

    With --run it runs as under `trimtab run`, with the same adjustments.

    Example: [bold]trimtab emulate cluster.yaml --run --plan plan.json -- train.py --lr 0.1[/bold]
    """
    from trimtab.cluster import load_cluster
    from trimtab.emulate import emulate as run_emulated
    from trimtab.emulate import parse_contention

    arguments = context.args
    if not arguments:
        raise TrimtabError(f"emulate: no script; write: trimtab emulate {cluster} -- SCRIPT ARGS")
    contentions = [parse_contention(text) for text in schedule or ()]
    machines = load_cluster(cluster)
    if under_run:
        arguments = _behind_bootstrap(arguments, machines.world_size)
    elif arguments[0].startswith("--"):
        raise TrimtabError(
            f"emulate: there is no option {arguments[0]} (see --help); those of `trimtab run` need --run"
        )
    status = run_emulated(machines, arguments, throttle=throttle, schedule=contentions, port=port)
    raise typer.Exit(status)


def _behind_bootstrap(arguments: list[str], world_size: int) -> list[str]:
    """What `trimtab run` would start on each of so many ranks for these arguments."""
    from trimtab.cli.run import torchrun_command

    count = f"--nproc-per-node={world_size}"
    _, _, _, *flags = torchrun_command([count, *arguments])  # after the interpreter, -m and the agent
    bootstrap = flags.index("-m")
    if flags[:bootstrap] != [count]:
        raise TrimtabError(
            f"emulate: {flags[1]} is decided by the cluster file; with --run only `trimtab run`'s own options "
            "are taken (--plan, ...)"
        )
    return flags[bootstrap:]
