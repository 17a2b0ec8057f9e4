"""ZERO-resizing: a slow rank leaves part of its own units or columns out of the products for a while.

Nothing moves and no collective changes, so only the slow rank calls `set_resize`. Which part is left out is chosen
anew every window of steps, by `trimtab.plan.resize`; how it is left out is `trimtab.tensor_parallel.resize`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn

    from trimtab.tensor_parallel.block import Elastic

    Selection = Literal["random", "priority", "priority-per-layer", "activation"]
    Form = Literal["unit", "column"]
    Impute = Literal["zero", "average", "same"]

WINDOW = 8
"""Optimiser steps between two choices."""


def watch_resize(model: nn.Module | Elastic, *, window: int = WINDOW) -> None:
    """Keep the statistics that choices need, window by window, also while nothing is left out; call on every rank.

    Costs a copy of the rank's units, and about two passes over it each window. `set_resize` does it where it was
    not done, and then the first window is chosen at random.
    """
    raise NotImplementedError


def set_resize(
    model: nn.Module | Elastic,
    ratio: float,
    *,
    selection: Selection = "priority",
    form: Form = "unit",
    impute: Impute = "zero",
    seed: int = 0,
) -> None:
    """Leave a part of this rank's products out, from the next forward pass on; call it between two steps.

    Only the rank that is to do less calls it; collectives keep their number, order and shape on all.

    Args:
        ratio: the part to leave out, at least 0 and below 1.
    """
    raise NotImplementedError


def clear_resize(model: nn.Module | Elastic) -> None:
    """Compute everything again, from the next forward pass on; the statistics are kept up."""
    raise NotImplementedError


def resized(model: nn.Module | Elastic) -> float:
    """The part of this rank's products of units that is left out now, after rounding; 0 if nothing is."""
    raise NotImplementedError
