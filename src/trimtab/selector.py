"""What trimtab may adjust in a job: one selector, the same in the launcher and in code."""

from __future__ import annotations

from collections.abc import Iterable

from trimtab.errors import TrimtabError

ADJUSTMENTS = ("bits", "shares", "precision")
"""Bits of gradients, batch shares of the ranks, precisions of operators. How gradients are bucketed and routed changes
no result, and comes with any of them."""

SELECTIONS = {"auto": ADJUSTMENTS, "exact": ("shares",), "none": ()}
"""Words for some of them. `exact` changes no result: every sample counts the same, whoever computes it."""


ALL = frozenset(ADJUSTMENTS)


def selected(adjust: str | Iterable[str]) -> frozenset[str]:
    """The adjustments that a selector allows: "auto", "exact", "none", or some of `ADJUSTMENTS`, comma-separated.

    Raises:
        TrimtabError: there is no such adjustment.
    """
    names = [name.strip() for name in adjust.split(",")] if isinstance(adjust, str) else list(adjust)
    if len(names) == 1 and names[0] in SELECTIONS:
        return frozenset(SELECTIONS[names[0]])
    for name in names:
        if name not in ADJUSTMENTS:
            alone = f"{name!r} stands alone" if name in SELECTIONS else f"there is no adjustment {name!r}"
            raise TrimtabError(
                f"adjust: {alone}; use {', '.join(SELECTIONS)}, or some of {', '.join(ADJUSTMENTS)} with commas between"
            )
    return frozenset(names)


def selection_text(adjust: frozenset[str]) -> str:
    """As a user would write it."""
    return ",".join(name for name in ADJUSTMENTS if name in adjust) or "none"
