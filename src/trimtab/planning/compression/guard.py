"""When fewer bits do harm: which layers to send in more, a pure function of what a run shows.

Signs, from the surest to the vaguest: a layer's compression error against its own gradient, what error
feedback owes it, and the run itself (gradients that run away or are no longer numbers, the loss).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil, isfinite, log2, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_BITS = 8

TARGET = 1.0
"""A layer that is beyond its limit is raised until its error is about so many times its gradient."""

OWED_LIMIT = 4.0
"""Error feedback may owe a layer so many times its gradient; settled, it owes about one at 2 bits."""

GROWTH_LIMIT = 10.0
"""A gradient so many times what it was at the looks before is running away."""

WORSE_BY = 0.05
"""A mean loss so much above the best counts as a sign, if that is also three times what it rose by before."""

PATIENCE = 2
"""Signs in a row before the loss counts as trouble: one bad stretch happens in any run."""

BEFORE = 3
"""Mean losses that must have come before, to know how a run's own scatter."""

BROKEN_PATIENCE = 3
"""Looks in a row without finite gradients before that counts: a loss scaler begins with a few overflows."""


@dataclass(frozen=True, kw_only=True)
class LayerHealth:
    """A layer as the guard sees it."""

    name: str
    bits: int
    norm: float
    """Of its gradient in a typical step."""

    error: float
    """Of the compression at these bits, over the gradient's norm."""

    owed: float = 0.0
    """What error feedback holds back, over the gradient's norm."""

    growth: float = 1.0
    """Its norm over what that was at the looks before."""

    broken: int = 0
    """How many looks in a row its gradient was not finite."""


@dataclass(frozen=True, kw_only=True)
class Raise:
    """A layer to be sent in more bits, and why."""

    name: str
    bits: int
    reason: str


def guard(layers: Sequence[LayerHealth], *, limit: float, losses: Sequence[float] = ()) -> list[Raise]:
    """The layers that need more bits.

    Args:
        limit: the most that a layer's `error` may be.
        losses: mean losses between looks, oldest first, where the loss is told; it may be empty.
    """
    raises: dict[str, Raise] = {}
    for layer in layers:
        if layer.bits >= MOST_BITS:
            continue
        if layer.broken >= BROKEN_PATIENCE:
            reason = f"its gradient was not finite for {layer.broken} looks"
            raises[layer.name] = Raise(name=layer.name, bits=MOST_BITS, reason=reason)
        elif layer.error > limit:
            # A bit halves the error.
            bits = min(layer.bits + max(ceil(log2(layer.error / min(limit, TARGET))), 1), MOST_BITS)
            reason = f"its error is {layer.error:.2g} of its gradient, above {limit:.2g}"
            raises[layer.name] = Raise(name=layer.name, bits=bits, reason=reason)
        elif not layer.owed <= OWED_LIMIT:
            reason = f"error feedback owes it {layer.owed:.2g} of its gradient, above {OWED_LIMIT:.2g}"
            raises[layer.name] = Raise(name=layer.name, bits=layer.bits + 1, reason=reason)
        elif layer.growth > GROWTH_LIMIT:
            reason = f"its gradient has grown {layer.growth:.3g}-fold"
            raises[layer.name] = Raise(name=layer.name, bits=layer.bits + 1, reason=reason)
    trouble = loss_trouble(losses)
    if trouble:
        for layer in _most_of_the_error(layers):
            if layer.name not in raises and layer.bits < MOST_BITS:
                raises[layer.name] = Raise(name=layer.name, bits=layer.bits + 1, reason=trouble)
    return list(raises.values())


def loss_trouble(losses: Sequence[float]) -> str:
    """In words, what is wrong with a row of mean losses; empty when nothing is."""
    if losses and not isfinite(losses[-1]):
        return "the loss is not finite"
    before = [loss for loss in losses[:-PATIENCE] if isfinite(loss)]
    if len(before) < BEFORE:
        return ""
    best = min(before)
    rises = [b - a for a, b in pairwise(before) if b > a]  # falling is what a loss should do
    scatter = sqrt(sum(rise * rise for rise in rises) / len(rises)) if rises else 0.0
    bound = best + max(WORSE_BY * abs(best), 3 * scatter)
    if all(not loss <= bound for loss in losses[-PATIENCE:]):
        return f"the loss rose from {best:.4g} to {losses[-1]:.4g}"
    return ""


def _most_of_the_error(layers: Sequence[LayerHealth]) -> list[LayerHealth]:
    """The fewest layers that hold half of the squared error."""
    falling = sorted(layers, key=lambda layer: (-layer.error * layer.norm, layer.name))
    total = sum((layer.error * layer.norm) ** 2 for layer in layers)
    found: list[LayerHealth] = []
    held = 0.0
    for layer in falling:
        if held >= total / 2:
            break
        found.append(layer)
        held += (layer.error * layer.norm) ** 2
    return found
