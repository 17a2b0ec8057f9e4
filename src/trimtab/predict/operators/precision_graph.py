"""The precision dependency graph: which operator computes in which precision, and the types between operators.

Adjustable operators compute in the precision that was set, dependent ones in the type of their inputs
(mixed types are promoted), fixed ones in the type they were captured with, after a cast if another type arrives.
"""

from __future__ import annotations

from copy import copy
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Literal

from trimtab.errors import TrimtabError
from trimtab.precision_names import HALVES
from trimtab.predict.operators.costs import plain_precision
from trimtab.predict.operators.low_precision import memory_type, passes
from trimtab.workload.operator import OUTSIDE

if TYPE_CHECKING:
    from trimtab.workload import Operator, Workload

Results = Literal["input", "own"]
"""The type of an operator's result: that of its input, as with `trimtab.precision`, or the half type it computed
in, as with operators that autocast lowers."""

_RANK = {"fp8": 0, "fp16": 1, "bf16": 1, "fp32": 2, "fp64": 3}


def promoted(types: list[str]) -> str | None:
    """The type to which torch promotes several: the widest, and fp32 for two different half types."""
    widest: str | None = None
    for name in types:
        if widest is None or _RANK[name] > _RANK[widest]:
            widest = name
        elif name != widest and _RANK[name] == _RANK[widest]:
            widest = "fp32"
    return widest


class PrecisionGraph:
    """Precisions of all operators, and the types that follow from them."""

    def __init__(self, workload: Workload, *, results: Results = "input") -> None:
        self.workload, self.results = workload, results
        self.plain = [plain_precision(operator) for operator in workload.operators]
        self.precision = list(self.plain)
        self.leaving = [_leaves(operator) for operator in workload.operators]
        self.captured = list(self.leaving)
        self.arriving: list[tuple[str, ...]] = [self._arriving(operator) for operator in workload.operators]

    def copy(self) -> PrecisionGraph:
        other = copy(self)
        other.precision, other.leaving = list(self.precision), list(self.leaving)
        other.arriving = list(self.arriving)
        return other

    def indices(self, operator: int | str) -> tuple[int, ...]:
        """All calls that are set together: given by one index, or by the name that `set_precision` takes."""
        name = self.workload.operators[operator].setting if isinstance(operator, int) else operator
        if name is None:
            assert isinstance(operator, int)
            raise TrimtabError(
                f"{self.workload.operators[operator].name}: its precision cannot be set; it is "
                f"{self.workload.operators[operator].category}"
            )
        if name not in self.workload.settings:
            some = ", ".join(list(self.workload.settings)[:8])
            raise TrimtabError(f"{name!r} is not an operator of {self.workload.model}; there are {some}, ...")
        return self.workload.settings[name]

    def set(self, operator: int | str, precision: str | None) -> tuple[int, ...]:
        """Set the precision of an operator (None: the plain one).

        Returns:
            Every operator whose precision or arriving types have changed, in order.
        """
        touched: set[int] = (
            set()
        )  # in forward order an operator comes after all that can reach it: once is enough
        queue: list[int] = []
        for index in self.indices(operator):
            wanted = precision or self.plain[index]
            if wanted != self.precision[index]:
                self.precision[index] = wanted
                touched.add(index)
                heappush(queue, index)
        while queue:
            index = heappop(queue)
            leaving = self._leaving(self.workload.operators[index])
            if leaving == self.leaving[index]:
                continue
            self.leaving[index] = leaving
            for consumer in self.workload.consumers[index]:
                other = self.workload.operators[consumer]
                self.arriving[consumer] = self._arriving(other)
                if consumer not in touched:
                    touched.add(consumer)
                    heappush(queue, consumer)
        return tuple(sorted(touched))

    def is_plain(self, index: int) -> bool:
        return self.precision[index] == self.plain[index]

    def computes_in(self, index: int) -> str:
        """The type of an operator's arithmetic."""
        operator = self.workload.operators[index]
        if operator.category == "dependent":
            return promoted(list(self.arriving[index])) or self.captured[index]
        return self.precision[index]

    def _arriving(self, operator: Operator) -> tuple[str, ...]:
        """The types of the floating inputs, as they come."""
        return tuple(
            tensor.dtype if producer == OUTSIDE else self._edge(producer, tensor.dtype)
            for producer, tensor in zip(operator.inputs, operator.input_tensors, strict=True)
            if tensor.floating
        )

    def _edge(self, producer: int, captured: str) -> str:
        # Results beside the first (statistics, masks) keep their types.
        return self.leaving[producer] if captured == self.captured[producer] else captured

    def _leaving(self, operator: Operator) -> str:
        index = operator.index
        captured = self.captured[index]
        if not operator.outputs or not operator.outputs[0].floating:
            return captured
        if operator.category != "dependent":
            return self._own(index) or captured
        arriving = promoted(list(self.arriving[index]))
        before = promoted([t.dtype for t in operator.input_tensors if t.floating])
        return arriving if arriving is not None and captured == before else captured

    def _own(self, index: int) -> str | None:
        if self.results == "input" or self.is_plain(index):
            return None
        name = memory_type(passes(self.precision[index])[0])
        return name if name in HALVES else "fp32"


def _leaves(operator: Operator) -> str:
    return operator.outputs[0].dtype if operator.outputs else operator.dtype
