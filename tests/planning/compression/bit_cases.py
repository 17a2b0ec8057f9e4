"""Layers for the tests of the bit policies."""

from __future__ import annotations

from itertools import product
from math import fsum
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from trimtab.planning.compression.layer_options import LayerOptions, total_error
from trimtab.wire_format import encoded_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence


def layer(name: str, numel: int, norm: float, *, most: int = 8) -> LayerOptions:
    """A layer as the block codec would leave it: every bit halves the error."""
    bits = tuple(range(1, most + 1))
    return LayerOptions(
        name=name,
        numel=numel,
        norm=norm,
        options=bits,
        errors=tuple(norm / (2**b - 1) for b in bits),
        costs=tuple(float(encoded_bytes(numel, b)) for b in bits),
    )


@st.composite
def small_tables(draw: st.DrawFn) -> list[LayerOptions]:
    """Few layers with few options: errors need not fall as costs rise, and may be zero or equal."""
    value = st.one_of(st.just(0.0), st.floats(1e-6, 1e6), st.sampled_from([0.5, 1.0, 2.0]))
    layers = []
    for index in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, 4))
        errors = draw(st.lists(value, min_size=count, max_size=count))
        costs = sorted(draw(st.lists(value, min_size=count, max_size=count)))
        layers.append(
            LayerOptions(
                name=f"layer{index}",
                numel=draw(st.integers(1, 1 << 20)),
                norm=draw(value),
                options=tuple(range(1, count + 1)),
                errors=tuple(errors),
                costs=tuple(costs),
            )
        )
    return layers


def cheapest_of_all(layers: Sequence[LayerOptions], budget: float) -> float | None:
    """The least cost within the budget, by trying every assignment; None when none fits."""
    costs = [
        fsum(one.costs[i] for one, i in zip(layers, chosen, strict=True))
        for chosen in product(*(range(len(one.options)) for one in layers))
        if total_error(one.errors[i] for one, i in zip(layers, chosen, strict=True)) <= budget
    ]
    return min(costs, default=None)
