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
) -> None:
    """Rehearse on one machine: run a script under torchrun on the emulated hosts of a cluster file.

    Example: [bold]trimtab emulate cluster.yaml -- train.py --lr 0.1[/bold]
    """
    from trimtab.cluster import load_cluster
    from trimtab.emulate import emulate as run_emulated
    from trimtab.emulate import parse_contention

    if not context.args:
        raise TrimtabError(f"emulate: no script; write: trimtab emulate {cluster} -- SCRIPT ARGS")
    contentions = [parse_contention(text) for text in schedule or ()]
    status = run_emulated(
        load_cluster(cluster), context.args, throttle=throttle, schedule=contentions, port=port
    )
    raise typer.Exit(status)
