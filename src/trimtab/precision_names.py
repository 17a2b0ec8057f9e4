"""The precisions an operator can have, and `Precision`: the one of each of its three products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

PrecisionName = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8"]
PRECISIONS: tuple[PrecisionName, ...] = get_args(PrecisionName)
"""Every precision, from most to least accurate within each family."""

HALVES: tuple[PrecisionName, ...] = ("bf16", "fp16")

PASSES = ("forward", "grad_input", "grad_weight")
"""The products of an operator, in the order of `Precision.names`."""

OperatorKind = Literal["linear", "conv", "attention", "embedding"]

OPERATOR_PRECISIONS: dict[OperatorKind, tuple[PrecisionName, ...]] = {
    "linear": PRECISIONS,
    "conv": ("fp32", "tf32", *HALVES, "int8"),
    "attention": ("fp32", *HALVES),
    "embedding": ("fp32", *HALVES),
}
"""The precisions each kind of operator can have on at least one device."""

NOT_ON_GPUS: dict[str, tuple[PrecisionName, ...]] = {"conv": ("int8",)}
"""By kind of operator, what no GPU offers: a convolution of int8 codes took four times as long on an H200 as cuDNN's in
bf16, forward and backward."""

ATTENTION = "/attention"
"""Suffix to a module's name: the products of activations that its forward computes."""

EVERYTHING = ("*", "?*")
"""Patterns that match every operator. In a precision that hands on bf16 they lower the products of activations too."""

LOW: tuple[PrecisionName, ...] = ("bf16", "int8", "fp8")
"""Precisions whose results are handed on in bf16."""

OWN = "own"
"""In place of a precision: the one the model has without trimtab."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The precision of an operator, product by product.

    A string stands for all three: ``"int8"`` is ``Precision(forward="int8", grad_input="int8",
    grad_weight="int8")``. Parameters and their gradients keep their own dtypes.
    """

    forward: PrecisionName
    grad_input: PrecisionName
    grad_weight: PrecisionName

    scales: Literal["row", "tensor"] | None = None
    """One scale for each row (channel) of a quantized operand, or one for the whole tensor. The default is
    rows for int8; fp8 always has one scale per tensor, because its exponent covers rows of unequal magnitude."""

    rounding: Literal["stochastic", "nearest"] | None = None
    """How int8 and fp8 round. The default is stochastic, except for fp8's input and weight: nearest.
    Half types always round to nearest."""

    def __post_init__(self) -> None:
        for which, name in zip(PASSES, self.names, strict=True):
            if name not in PRECISIONS:
                raise ValueError(
                    f"{which}: there is no precision {name!r}; choose from {', '.join(PRECISIONS)}"
                )
        if self.scales not in (None, "row", "tensor"):
            raise ValueError(f"scales must be 'row' or 'tensor'; got {self.scales!r}")
        if self.scales == "row" and "fp8" in self.names:
            raise ValueError("fp8 has one scale for the whole tensor: leave scales out")
        if self.rounding not in (None, "stochastic", "nearest"):
            raise ValueError(f"rounding must be 'stochastic' or 'nearest'; got {self.rounding!r}")

    @classmethod
    def of(cls, value: Precision | str) -> Precision:
        """The precision itself, or the one that a string stands for."""
        if isinstance(value, Precision):
            return value
        if value not in PRECISIONS:
            raise ValueError(f"there is no precision {value!r}; choose from {', '.join(PRECISIONS)}")
        return cls(forward=value, grad_input=value, grad_weight=value)

    @property
    def names(self) -> tuple[PrecisionName, PrecisionName, PrecisionName]:
        """The precisions of forward, input gradient and weight gradient."""
        return (self.forward, self.grad_input, self.grad_weight)

    def encode(self) -> str:
        """As a short string, which registered torch operators can take as an argument; `decode` reads it."""
        return ",".join([*self.names, self.scales or "", self.rounding or ""])

    @staticmethod
    @lru_cache
    def decode(text: str) -> Precision:
        """The precision that `encode` wrote."""
        forward, grad_input, grad_weight, scales, rounding = text.split(",")
        return Precision(
            forward=forward,  # type: ignore[arg-type]
            grad_input=grad_input,  # type: ignore[arg-type]
            grad_weight=grad_weight,  # type: ignore[arg-type]
            scales=scales or None,  # type: ignore[arg-type]
            rounding=rounding or None,  # type: ignore[arg-type]
        )

    def __str__(self) -> str:
        return self.forward if len(set(self.names)) == 1 else "/".join(self.names)


def lowers_products(precisions: Mapping[str, Precision | str]) -> bool:
    """Whether products of activations are computed in bf16 as well: a pattern for everything hands on bf16."""
    return any(
        pattern in EVERYTHING and Precision.of(value).forward in LOW for pattern, value in precisions.items()
    )
