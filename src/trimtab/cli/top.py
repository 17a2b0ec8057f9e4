"""`trimtab top`: watch a run from another terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer


def top(
    run: Annotated[
        Path | None,
        typer.Argument(help="The run folder; by default the newest in trimtab-runs.", show_default=False),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two frames.", min=0.2)] = 2.0,
) -> None:
    """Watch a running job, or look at one that has ended: speed, shares, bits, waiting and memory of each rank.

    It only reads the run folder, so it works over SSH and costs the job nothing.

    Example: [bold]trimtab top trimtab-runs/20260921-120000-train[/bold]
    """
    from rich.console import Console
    from rich.live import Live

    from trimtab.report.live import LiveRun, frame
    from trimtab.report.run_folder import latest_run, load_run

    folder = latest_run() if run is None else run
    console = Console()
    current = load_run(folder)  # says what is wrong with the folder
    if once or not console.is_terminal:
        console.print(frame(current, width=console.width))
        return
    live_run = LiveRun(folder)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        try:
            while True:
                current = live_run.poll()
                live.update(frame(current, width=console.width), refresh=True)
                if current.ended:
                    break
                time.sleep(every)
        except KeyboardInterrupt:
            pass
    console.print(frame(current, width=console.width))
    sys.stdout.flush()
