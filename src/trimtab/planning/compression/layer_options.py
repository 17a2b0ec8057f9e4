"""What a layer's gradient can be sent in: its options, their errors and costs, and an assignment of one to each layer.

Nothing here knows the compressor: a layer is a name with options (bits, PowerSGD ranks, per-mille
densities), each with an error and a cost that were measured or predicted elsewhere. Errors of one run
are all of one family, since biased and unbiased errors do not share a budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum, isfinite, sqrt

ALL_BITS = tuple(range(1, 9))
"""Bits per value that the codec supports."""


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """A layer, with the error and the cost of each way to send its gradient."""

    name: str
    numel: int
    norm: float
    """Euclidean norm of the gradient that the errors were measured on."""

    options: tuple[int, ...]
    """Bits, PowerSGD ranks or per-mille densities, by increasing cost."""

    errors: tuple[float, ...]
    """Euclidean norm of each option's error; it need not decrease as the cost increases."""

    costs: tuple[float, ...]
    """Seconds on the measured link, or bytes when its rate is unknown."""

    def __post_init__(self) -> None:
        if not self.options or not len(self.options) == len(self.errors) == len(self.costs):
            raise ValueError(f"{self.name}: every option of {self.options} needs one error and one cost")
        if len(set(self.options)) != len(self.options):
            raise ValueError(f"{self.name}: an option appears twice in {self.options}")
        if not all(isfinite(v) and v >= 0 for v in (self.norm, *self.errors, *self.costs)):
            raise ValueError(
                f"{self.name}: norm, errors and costs must be finite and at least 0; got norm {self.norm}, "
                f"errors {self.errors}, costs {self.costs}"
            )


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """An option for every layer."""

    options: dict[str, int]
    """By layer name: bits, or the family's other kind of option."""

    cost: float
    error: float
    """Square root of the sum of squared errors."""

    policy: str
    met: bool
    """Whether the error is within the budget; otherwise this is the most exact assignment possible."""


def total_error(errors: Iterable[float]) -> float:
    """Square root of the sum of squares, independent of the order."""
    return sqrt(fsum(error * error for error in errors))


def uniform_error(layers: Sequence[LayerOptions], option: int = 4) -> float:
    """Total error with the same option for every layer: the reference for budgets."""
    return total_error(layer.errors[_index(layer, option)] for layer in layers)


def uniform_cost(layers: Sequence[LayerOptions], option: int = 4) -> float:
    """Total cost with the same option for every layer."""
    return fsum(layer.costs[_index(layer, option)] for layer in layers)


def most_exact(layers: Sequence[LayerOptions]) -> list[int]:
    """Each layer's option with the smallest error, the cheapest of equals."""
    return [
        min(range(len(layer.options)), key=lambda i, layer=layer: (layer.errors[i], layer.costs[i]))  # type: ignore[misc]
        for layer in layers
    ]


def within(layers: Sequence[LayerOptions], chosen: Sequence[int], budget: float) -> bool:
    """Whether the total error of these options is at most the budget."""
    return total_error(layer.errors[i] for layer, i in zip(layers, chosen, strict=True)) <= budget


def assigned(layers: Sequence[LayerOptions], chosen: Sequence[int], budget: float, policy: str) -> Assignment:
    """The assignment of these options, which are given by index."""
    picked = list(zip(layers, chosen, strict=True))
    error = total_error(layer.errors[i] for layer, i in picked)
    return Assignment(
        options={layer.name: layer.options[i] for layer, i in picked},
        cost=fsum(layer.costs[i] for layer, i in picked),
        error=error,
        policy=policy,
        met=error <= budget,
    )


def _index(layer: LayerOptions, option: int) -> int:
    if option not in layer.options:
        raise ValueError(f"{layer.name} has no option {option}, only {layer.options}")
    return layer.options.index(option)
