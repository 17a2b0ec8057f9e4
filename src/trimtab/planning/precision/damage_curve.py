"""The curve of time against damage: what other damage budgets would bring. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

BUDGETS, DECADES = 12, 4
"""So many budgets, over so many powers of ten below the largest damage."""

CLOSE = 1e-3
"""Step times that differ by a smaller fraction count as equal."""


def budgets(most: float) -> tuple[float, ...]:
    """The budgets to try, from none; `most` is the largest damage there can be."""
    if not most:
        return ()
    return 0.0, *(most * 10 ** (-DECADES * step / (BUDGETS - 1)) for step in range(BUDGETS))


def pareto(
    own: tuple[float, float], points: Iterable[tuple[float, float]]
) -> tuple[tuple[float, float], ...]:
    """The (step, damage) that no other beats in both, from no damage to the fastest; a plan's own is among them.

    Points that beat the plan's own are left out: they break rules that the plan keeps.
    """
    kept: list[tuple[float, float]] = []
    others = {p for p in points if p[0] > own[0] * (1 + CLOSE) or p[1] > own[1]}
    for step_s, damage in sorted(others | {own}):
        if not kept or damage < kept[-1][1]:
            kept.append((step_s, damage))
    return tuple(reversed(kept))
