"""Batch sizes as a user writes them: ``auto``, ``equal`` or ``24,11,11``."""

from __future__ import annotations

from trimtab.errors import TrimtabError


def parse_sizes(text: str) -> tuple[int, ...] | None:
    """The sizes by rank; None for `auto` and `equal`."""
    if text in ("auto", "equal"):
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise TrimtabError(
            f"run: --batch-sizes {text}: give auto, equal, or one whole number above 0 for each rank, as in 24,11,11"
        )
    return tuple(map(int, parts))
