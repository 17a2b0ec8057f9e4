"""The settings with which a running tensor-parallel job is balanced: `trimtab.Balance`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from trimtab.errors import TrimtabError

Selection = Literal["random", "priority", "priority-per-layer", "activation"]
Form = Literal["unit", "column"]
Impute = Literal["zero", "average", "same"]


@dataclass(frozen=True, kw_only=True)
class Balance:
    """When and how the ranks of a tensor-parallel job are balanced: `tensor_parallel(..., balance=Balance(...))`.

    The defaults are those of ``balance="auto"``: exact, and right for most jobs.
    """

    own: bool = True
    """Whether units may move to other ranks for good, with their optimizer state."""

    lease: bool = True
    """Whether other ranks may compute units for a while, which stay with their owner."""

    resize: float = 0.0
    """Largest fraction of a slow rank's work that it may leave out for a while; 0 keeps training exact."""

    selection: Selection = "activation"
    """What is left out: ``"activation"``, what contributes least; ``"priority"``, what changed least; ``"random"``."""

    form: Form = "unit"
    """Leave out whole hidden units and heads, or columns over which each product sums (``"column"``)."""

    impute: Impute = "zero"
    """Gradients of what is left out: ``"zero"``, which freezes it, ``"average"`` of the others, ``"same"`` as last."""

    price: float = 1.5
    """Leaving out a small fraction p of all work must shorten steps by more than this many times p."""

    window: int = 8
    """Steps of one measurement."""

    threshold: float = 1.1
    """Ranks count as uneven when their longest time exceeds the shortest by this factor."""

    patience: int = 2
    """Windows in a row that must be uneven; also the fewest between two changes."""

    review: int = 6
    """Windows after which a lease or a resize is reconsidered, even if the ranks are even."""

    margin: float = 0.04
    """Least gain of a change, as a fraction of the step."""

    horizon: int = 100
    """Expected steps until the ranks are even again, when nothing is known."""

    def __post_init__(self) -> None:
        for name in ("own", "lease"):
            if not isinstance(getattr(self, name), bool):
                raise TrimtabError(f"Balance: {name} is True or False, got {getattr(self, name)!r}")
        for name in ("window", "patience", "review", "horizon"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise TrimtabError(
                    f"Balance: {name} is a whole number of at least 1, got {value!r}; {_MEANING[name]}"
                )
        for name, least, below in _RANGES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < below:
                limit = "" if below == float("inf") else f" and below {below:g}"
                raise TrimtabError(
                    f"Balance: {name} must be at least {least:g}{limit}, got {value!r}; {_MEANING[name]}"
                )
        for name, known in (("selection", Selection), ("form", Form), ("impute", Impute)):
            if getattr(self, name) not in get_args(known):
                raise TrimtabError(
                    f"Balance: {name}={getattr(self, name)!r} is unknown; choose {', '.join(get_args(known))}"
                )
        if not (self.own or self.lease or self.resize):
            raise TrimtabError(
                "Balance: own=False, lease=False and resize=0 leave nothing to do; allow one, or use balance=None"
            )


_RANGES = (
    ("resize", 0.0, 1.0),
    ("price", 0.0, float("inf")),
    ("threshold", 1.0, float("inf")),
    ("margin", 0.0, 1.0),
)
_MEANING = {
    "resize": "it is the largest fraction of a rank's work that may be left out",
    "price": "it is what leaving out a fraction of the work must save, in multiples of it",
    "threshold": "it is the longest time of a rank over the shortest from which ranks count as uneven",
    "margin": "it is the least gain of a change, as a fraction of the step",
    "window": "it is the steps of one measurement",
    "patience": "it is the windows in a row that must be uneven",
    "review": "it is the windows after which a lease or a resize is reconsidered",
    "horizon": "it is the steps until the ranks are expected to be even again",
}
