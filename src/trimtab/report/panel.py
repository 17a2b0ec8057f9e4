"""A panel at the bottom of a terminal, while other processes write above it.

The terminal scrolls only the lines above the panel (its scroll region), so what a script prints, progress bars
included, looks as it would without the panel; nothing of it passes through here.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

LEAST_ROWS, LEAST_COLUMNS = 16, 60
"""A smaller terminal gets no panel."""

_SAVE, _RESTORE, _CLEAR_LINE, _CLEAR_BELOW = "\0337", "\0338", "\033[2K", "\033[J"


def suits_a_panel(*streams: TextIO) -> bool:
    """Whether all of these are one terminal that is large enough."""
    if os.environ.get("TERM", "dumb") == "dumb" or not all(stream.isatty() for stream in streams):
        return False
    columns, rows = _size(streams[0])
    return rows >= LEAST_ROWS and columns >= LEAST_COLUMNS


class Panel:
    """Draws lines at the bottom of the terminal."""

    def __init__(self, terminal: TextIO | None = None) -> None:
        self._terminal = terminal or sys.stderr
        self._height = 0
        self._rows = 0

    @property
    def columns(self) -> int:
        return _size(self._terminal)[0]

    def draw(self, lines: list[str]) -> None:
        """Replace the panel; it grows where it must, up to half of the terminal."""
        columns, rows = _size(self._terminal)
        lines = lines[: rows // 2]
        text = ""
        height = max(len(lines) + 1, self._height)
        if height != self._height or rows != self._rows:
            # Scroll up what is there, then keep the scrolling above the panel.
            grown = max(height - self._height, 0) if rows == self._rows else height
            text += "\n" * grown + f"\033[{grown}A" if grown else ""
            text += f"{_SAVE}\033[1;{rows - height}r{_RESTORE}"
            self._height, self._rows = height, rows
        top = rows - height + 1
        text += f"{_SAVE}\033[{top};1H{_CLEAR_LINE}{'─' * columns}"
        for place in range(height - 1):
            line = lines[place] if place < len(lines) else ""
            text += f"\033[{top + 1 + place};1H{_CLEAR_LINE}{line}"
        self._write(text + "\033[0m" + _RESTORE)

    def close(self) -> None:
        """Remove the panel and let the whole terminal scroll again."""
        if self._height:
            top = self._rows - self._height + 1
            self._write(f"{_SAVE}\033[r\033[{top};1H{_CLEAR_BELOW}{_RESTORE}")
            self._height = 0

    def _write(self, text: str) -> None:
        with suppress(OSError):  # the terminal was closed
            self._terminal.write(text)  # at once: nothing of the script may come in between
            self._terminal.flush()


def _size(terminal: TextIO) -> tuple[int, int]:
    try:
        columns, rows = os.get_terminal_size(terminal.fileno())
    except (OSError, ValueError):
        columns, rows = 80, 24
    return columns, rows
