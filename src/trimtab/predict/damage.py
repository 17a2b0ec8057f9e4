"""Damage of lowering an operator's precision: the arithmetic, from numbers measured elsewhere.

Damage is the expected squared error of the model's gradient over its squared length, E‖ĝ − g‖² / ‖g‖². Roundings
are independent, so damages add up over operators; for a rank with share w of the batch, w² of its damage reaches
the averaged gradient.

Every operator has *sources* of error: its rounded operands, and its results if they are rounded. The damage of a
source is its relative error, ‖rounding error‖² / ‖values‖², times its *gain*: the effect of one unit of relative
error there on the gradient. Errors depend on the values and are cheap to track during training; gains
depend on the model and are measured by `trimtab.measure.damage.indicators`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Damage = dict[str, dict[str, float]]
"""By operator name, as `trimtab.set_precision` takes it, and precision; 0 for the model's own."""

MANTISSA = {"tf32": 10, "fp16": 10, "bf16": 7, "e4m3": 3, "e5m2": 2}
"""Mantissa bits of floating-point formats."""

INTEGER_BITS = {"int8": 8}


@dataclass(frozen=True, kw_only=True)
class Source:
    """One place where a precision rounds."""

    error: float
    """‖rounding error‖² / ‖values‖²; 0 if all values are 0."""

    gain: float
    """Relative squared error of the gradient per unit of `error`."""

    @property
    def damage(self) -> float:
        return self.error * self.gain


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """How much an operator's rounding matters, up to a factor that all operators share."""

    size: float
    """‖input‖² · ‖gradient of the result‖² of a row: what an error of the operands is multiplied by."""

    errors: Mapping[str, float]
    """By precision: ‖rounding error‖² / ‖values‖², summed over its sources."""


Sources = dict[str, dict[str, dict[str, Source]]]
"""By operator, precision and the source's name."""


def damage_of(sources: Sources) -> Damage:
    """The sum over each operator's sources."""
    return {
        name: {precision: sum(s.damage for s in found.values()) for precision, found in by.items()}
        for name, by in sources.items()
    }


def plan_damage(damage: Damage, ranks: Iterable[tuple[Mapping[str, str], float]]) -> float:
    """Damage of the averaged gradient when ranks lower operators.

    Args:
        ranks: for each rank, its precisions by operator (those that are not named stay), and its share of the
            batch: samples over all ranks' samples.
    """
    return sum(
        share * share * sum(damage[name][precision] for name, precision in precisions.items())
        for precisions, share in ranks
    )


def fixed_point_variance(amax: float, numel: int, bits: int) -> float:
    """Variance added by stochastic rounding to 2^bits − 1 levels over ±amax: S² / 6 for each element."""
    step = amax / ((1 << bits - 1) - 1)
    return step * step * numel / 6


def floating_point_variance(exponent: int, numel: int, mantissa: int) -> float:
    """Variance added by stochastic rounding of values of about 2^exponent to `mantissa` bits."""
    step = math.ldexp(1.0, exponent) / (1 << mantissa)
    return step * step * numel / 6


@dataclass(frozen=True, kw_only=True)
class TensorStatistics:
    """Statistics of a tensor for the formula by depth."""

    squared: float
    """‖values‖²."""

    amax: float
    numel: int
    exponent: int
    """log2 of the root mean square, rounded down."""

    def variance(self, format_: str) -> float:
        """Variance added by rounding to a format: int8, or one of `MANTISSA`."""
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
    of backward. It is in the values' own units, so it ranks operators but is not a relative error.
    """
    ahead, back = ("e4m3", "e5m2") if precision == "fp8" else (precision, precision)
    forward = weight.squared * value.variance(ahead) + value.squared * weight.variance(ahead)
    backward = gradient.squared * value.variance(ahead) + value.squared * gradient.variance(back)
    return gamma * (deepest - depth) * forward + depth * backward
