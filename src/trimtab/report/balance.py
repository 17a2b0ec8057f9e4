"""Decisions of the controller over time, drawn for the terminal: who computes how much, and what that did."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.runtime.balance import Record

_WIDTH = 16
"""Characters of a bar that stands for all work."""


def draw_decisions(records: Sequence[Record], *, console: Console | None = None) -> None:
    """A line for each decision: a bar for each rank's share, hollow where work is left out, and predicted beside
    measured times of the slowest rank."""
    console = console or Console()
    if not records:
        console.print("the ranks were even: nothing was decided")
        return
    table = Table(title="balance", title_justify="left")
    table.add_column("step", justify="right")
    for rank in range(len(records[0].times)):
        table.add_column(f"rank {rank}")
    for name in ("before ms", "predicted ms", "measured ms", "took ms"):
        table.add_column(name, justify="right")
    for record in records:
        decision = record.decision
        cells = [
            _cell(share, part, action)
            for share, part, action in zip(decision.shares, decision.pruned, decision.actions, strict=True)
        ]
        measured = "-" if record.measured is None else f"{record.measured * 1e3:.1f}"
        table.add_row(
            str(record.step),
            *cells,
            f"{decision.before * 1e3:.1f}",
            f"{decision.predicted * 1e3:.1f}",
            measured,
            f"{record.took * 1e3:.0f}",
        )
    console.print(table)


def _cell(share: float, pruned: float, action: str) -> Text:
    full = round(share * (1 - pruned) * _WIDTH)
    hollow = round(share * _WIDTH) - full
    said = f" {share:.0%}" + (f", {pruned:.0%} left out" if pruned else "")
    return Text("█" * full + "░" * hollow + said + ("" if action == "nothing" else f"\n{action}"))
