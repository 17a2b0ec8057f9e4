"""How much lowering an operator's precision hurts: the arithmetic, from numbers that were measured elsewhere.

Damage is the expected squared error of the model's gradient over its squared length, E‖ĝ − g‖² / ‖g‖². Roundings
are independent, so damages add up over operators; of a rank whose share of the batch is w, w² of it reaches the
averaged gradient.

Every operator has *sources* of error: its operands as they are rounded, and its results where those are. A
source's damage is its relative error, ‖rounding error‖² / ‖values‖², times its *gain*: what one unit of relative
error there does to the gradient. Errors follow the values and are cheap to follow while training runs; gains
follow the model and are found by `trimtab.measure.damage.indicators`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Damage = dict[str, dict[str, float]]
"""By the operator's name, as `trimtab.set_precision` takes it, and the precision's; 0 for the model's own."""

MANTISSA = {"tf32": 10, "fp16": 10, "bf16": 7, "e4m3": 3, "e5m2": 2}
"""Bits of the fraction of floating-point formats."""

INTEGER_BITS = {"int8": 8}


@dataclass(frozen=True, kw_only=True)
class Source:
    """One place where a precision rounds."""

    error: float
    """‖rounding error‖² / ‖values‖²; 0 where the values are all 0."""

    gain: float
    """Relative squared error of the gradient for a unit of `error`."""

    @property
    def damage(self) -> float:
        return self.error * self.gain


Sources = dict[str, dict[str, dict[str, Source]]]
"""By operator, precision and the source's name."""


def damage_of(sources: Sources) -> Damage:
    """The sum over each operator's sources."""
    return {
        name: {precision: sum(s.damage for s in found.values()) for precision, found in by.items()}
        for name, by in sources.items()
    }


def plan_damage(damage: Damage, ranks: Iterable[tuple[Mapping[str, str], float]]) -> float:
    """Of the averaged gradient, when ranks lower operators.

    Args:
        ranks: for each rank, its precisions by operator (those that are not named stay), and its share of the
            batch: samples over all ranks' samples.
    """
    return sum(
        share * share * sum(damage[name][precision] for name, precision in precisions.items())
        for precisions, share in ranks
    )


def fixed_point_variance(amax: float, numel: int, bits: int) -> float:
    """Added by stochastic rounding to 2^bits − 1 levels over ±amax: S² / 6 for each of the elements."""
    step = amax / ((1 << bits - 1) - 1)
    return step * step * numel / 6


def floating_point_variance(exponent: int, numel: int, mantissa: int) -> float:
    """Added by stochastic rounding to `mantissa` bits of values of about 2^exponent."""
    step = math.ldexp(1.0, exponent) / (1 << mantissa)
    return step * step * numel / 6


@dataclass(frozen=True, kw_only=True)
class TensorStatistics:
    """What the formula of depth needs to know of a tensor."""

    squared: float
    """‖values‖²."""

    amax: float
    numel: int
    exponent: int
    """Of a typical magnitude: log2 of the root mean square, rounded down."""

    def variance(self, format_: str) -> float:
        """Added by rounding to a format: int8, or one of `MANTISSA`."""
        if format_ in INTEGER_BITS:
            return fixed_point_variance(self.amax, self.numel, INTEGER_BITS[format_])
        return floating_point_variance(self.exponent, self.numel, MANTISSA[format_])


def bidirectional(
    weight: TensorStatistics,
    value: TensorStatistics,
    gradient: TensorStatistics,
    precision: str,
    *,
    depth: int,
    deepest: int,
    gamma: float = 1.0,
) -> float:
    """γ (L − d) · forward + d · backward: an early error passes through all that follows, a late one through all
    of backward. In the values' own units: it ranks operators, and is no relative error.
    """
    ahead, back = ("e4m3", "e5m2") if precision == "fp8" else (precision, precision)
    forward = weight.squared * value.variance(ahead) + value.squared * weight.variance(ahead)
    backward = gradient.squared * value.variance(ahead) + value.squared * gradient.variance(back)
    return gamma * (deepest - depth) * forward + depth * backward
