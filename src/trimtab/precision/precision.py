"""Which precision each of an operator's three products is computed in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

Name = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8"]
NAMES: tuple[Name, ...] = get_args(Name)
"""Every precision trimtab knows, from most to least faithful within each family."""

PASSES = ("forward", "grad_input", "grad_weight")
HALVES: tuple[Name, ...] = ("bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The precision of an operator, product by product.

    A string stands for all three: ``"int8"`` is ``Precision(forward="int8", grad_input="int8",
    grad_weight="int8")``. Parameters, their gradients and what leaves the operator keep their own types.
    """

    forward: Name
    grad_input: Name
    grad_weight: Name

    scales: Literal["row", "tensor"] | None = None
    """One scale for each row (channel) of a quantised operand, or for all of it. By default int8 takes
    rows; fp8, whose exponent spans rows of unequal size, always takes the tensor."""

    rounding: Literal["stochastic", "nearest"] | None = None
    """How int8 and fp8 round. By default stochastic, save for fp8's input and weight: nearest.
    Half types always round to nearest."""

    def __post_init__(self) -> None:
        for which in PASSES:
            if (name := getattr(self, which)) not in NAMES:
                raise ValueError(f"{which}: there is no precision {name!r}; there are {', '.join(NAMES)}")
        if self.scales not in (None, "row", "tensor"):
            raise ValueError(f"scales must be 'row' or 'tensor'; got {self.scales!r}")
        if self.scales == "row" and "fp8" in self.names:
            raise ValueError("fp8 takes one scale for the whole tensor: leave scales out")
        if self.rounding not in (None, "stochastic", "nearest"):
            raise ValueError(f"rounding must be 'stochastic' or 'nearest'; got {self.rounding!r}")

    @classmethod
    def of(cls, value: Precision | str) -> Precision:
        """The precision itself, or the one a string stands for."""
        if isinstance(value, Precision):
            return value
        if value not in NAMES:
            raise ValueError(f"there is no precision {value!r}; there are {', '.join(NAMES)}")
        return cls(forward=value, grad_input=value, grad_weight=value)

    @property
    def names(self) -> tuple[Name, Name, Name]:
        """The precisions of forward, input gradient and weight gradient."""
        return (self.forward, self.grad_input, self.grad_weight)

    def encode(self) -> str:
        """A short string that `decode` reads: the form in which registered operators carry it."""
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
