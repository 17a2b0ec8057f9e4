"""Tables and progress bars for the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

SILENT_S = 60.0
"""Where nothing is drawn, a line is printed this often."""


def print_table(title: str, rows: Sequence[Mapping[str, Any]], *, caption: str | None = None) -> None:
    """Rows as a table; columns in the order in which they first appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for column in columns:
        numeric = all(isinstance(row.get(column), int | float | None) for row in rows)
        first = column == columns[0]
        table.add_column(column.replace("_", " "), justify="right" if numeric else "left", no_wrap=first)
    for row in rows:
        table.add_row(*(_shown(row.get(column)) for column in columns))
    Console().print(table)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, moved by calling the given function with (done, in all).

    Where standard error is not a terminal, long work prints a line every minute instead.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        began = said = time.monotonic()

        def move(done: int, total: int) -> None:
            nonlocal said
            progress.update(task, completed=done, total=total)
            now = time.monotonic()
            if not console.is_terminal and now - said >= SILENT_S:
                said = now
                print(f"{what}: {done} of {total} after {now - began:.0f} s", file=sys.stderr, flush=True)

        yield move


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
