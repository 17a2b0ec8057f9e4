"""Detects harm from too few bits and raises the layers concerned: a pure function of a run's statistics.

Signs, from the strongest to the weakest: a layer's compression error relative to its own gradient, what error
feedback owes it, and the run itself (gradients that explode or are not finite, the loss).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, isfinite, log2, sqrt

MOST_BITS = 8

TARGET = 1.0
"""A layer beyond its limit is raised until its error is about this many times its gradient."""

OWED_LIMIT = 4.0
"""Error feedback may owe a layer this many times its gradient; in steady state it owes about one at 2 bits."""

GROWTH_LIMIT = 10.0
"""A gradient this many times as large as at earlier looks is exploding."""

WORSE_BY = 0.05
"""A mean loss this far above the best counts as a sign, if that is also three times its earlier rises."""

PATIENCE = 2
"""Signs in a row before the loss counts as trouble: a single bad interval happens in any run."""

BEFORE = 3
"""Mean losses needed first, to know how much those of this run vary."""

BROKEN_PATIENCE = 3
"""Looks in a row without finite gradients before they count: a loss scaler starts with a few overflows."""


@dataclass(frozen=True, kw_only=True)
class LayerHealth:
    """A layer as the guard sees it."""

    name: str
    bits: int
    norm: float
    """Norm of its gradient in a typical step."""

    error: float
    """Compression error at these bits, relative to the gradient's norm."""

    owed: float = 0.0
    """What error feedback holds back, relative to the gradient's norm."""

    growth: float = 1.0
    """Its norm relative to earlier looks."""

    broken: int = 0
    """Looks in a row in which its gradient was not finite."""


@dataclass(frozen=True, kw_only=True)
class Raise:
    """A layer that needs more bits, and why."""

    name: str
    bits: int
    reason: str


def guard(layers: Sequence[LayerHealth], *, limit: float, losses: Sequence[float] = ()) -> list[Raise]:
    """The layers that need more bits.

    Args:
        limit: the largest `error` a layer may have.
        losses: mean losses between looks, oldest first; empty when the script reports none.
    """
    raises: dict[str, Raise] = {}
    for layer in layers:
        if layer.bits >= MOST_BITS:
            continue
        bits, reason = layer.bits + 1, ""
        if layer.broken >= BROKEN_PATIENCE:
            bits, reason = MOST_BITS, f"its gradient was not finite for {layer.broken} looks"
        elif layer.error > limit:
            # A bit halves the error.
            bits = min(layer.bits + max(ceil(log2(layer.error / min(limit, TARGET))), 1), MOST_BITS)
            reason = f"its error is {layer.error:.2g} of its gradient, above {limit:.2g}"
        elif not layer.owed <= OWED_LIMIT:
            reason = f"error feedback owes it {layer.owed:.2g} of its gradient, above {OWED_LIMIT:.2g}"
        elif layer.growth > GROWTH_LIMIT:
            reason = f"its gradient has grown {layer.growth:.3g}-fold"
        if reason:
            raises[layer.name] = Raise(name=layer.name, bits=bits, reason=reason)
    trouble = loss_trouble(losses)
    if trouble:
        for layer in _most_of_the_error(layers):
            if layer.name not in raises and layer.bits < MOST_BITS:
                raises[layer.name] = Raise(name=layer.name, bits=layer.bits + 1, reason=trouble)
    return list(raises.values())


def loss_trouble(losses: Sequence[float]) -> str:
    """What is wrong with a sequence of mean losses, in words; empty when nothing is."""
    if losses and not isfinite(losses[-1]):
        return "the loss is not finite"
    before = [loss for loss in losses[:-PATIENCE] if isfinite(loss)]
    if len(before) < BEFORE:
        return ""
    best = min(before)
    rises = [b - a for a, b in pairwise(before) if b > a]  # by_error is what a loss should do
    scatter = sqrt(sum(rise * rise for rise in rises) / len(rises)) if rises else 0.0
    bound = best + max(WORSE_BY * abs(best), 3 * scatter)
    if all(not loss <= bound for loss in losses[-PATIENCE:]):
        return f"the loss rose from {best:.4g} to {losses[-1]:.4g}"
    return ""


def _most_of_the_error(layers: Sequence[LayerHealth]) -> list[LayerHealth]:
    """The fewest layers that together have half of the squared error."""
    by_error = sorted(layers, key=lambda layer: (-layer.error * layer.norm, layer.name))
    total = sum((layer.error * layer.norm) ** 2 for layer in layers)
    largest: list[LayerHealth] = []
    covered = 0.0
    for layer in by_error:
        if covered >= total / 2:
            break
        largest.append(layer)
        covered += (layer.error * layer.norm) ** 2
    return largest
