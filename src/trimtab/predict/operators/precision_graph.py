"""The precision dependency graph: which operator computes in which precision, and the types between operators.

Adjustable operators compute in the precision that was set, dependent ones in the type of their inputs
(mixed types are promoted), fixed ones in the type they were captured with, after a cast if another type arrives.
"""

from __future__ import annotations

from copy import copy
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Literal

from trimtab.errors import TrimtabError
from trimtab.predict.operators.costs import plain_precision
from trimtab.predict.operators.low_precision import passes
from trimtab.workload.operator import OUTSIDE

if TYPE_CHECKING:
    from collections.abc import Container

    from trimtab.predict.operators.low_precision import DeviceKind
    from trimtab.workload import Operator, Tensor, Workload

Results = Literal["input", "own"]
"""The type of a lowered operator's result: that of its input, as under `torch.compile` and as autocast has it, or bf16,
as `trimtab.precision` hands it on in a model in fp32 without autocast."""

State = tuple[str, tuple[str, ...], str]
"""Of an operator: its precision, the types of its floating inputs, and the type of its result."""

HANDED_ON = ("bf16", "int8", "fp8")
"""Precisions whose results are then bf16. fp16 is not handed on, and neither are embeddings."""

# fmt: off
_FULL_ON_GPU = frozenset({
    "pow", "exp", "expm1", "log", "log2", "log10", "log1p", "reciprocal", "rsqrt", "softplus", "sum", "prod", "cumsum",
    "cumprod", "linalg_vector_norm", "tan", "sinh", "cosh", "acos", "asin",
})
# fmt: on
"""What autocast computes in fp32 on a GPU, beside norms, softmax and losses, and on a CPU in the type that arrives."""

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


def results_of(workload: Workload, casts: Container[str]) -> Results:
    """What operators hand on where these casts were measured: those of bf16 only if the device computes in it."""
    return own_results(workload) if "fp32>bf16" in casts and "bf16>fp32" in casts else "input"


def own_results(workload: Workload) -> Results:
    """What operators hand on where a device computes in bf16: under autocast, or if some of its parameters are not in
    fp32, a model has types of its own."""
    full = all(p.tensor.dtype == "fp32" for p in workload.parameters if p.tensor.floating)
    return "own" if full and not workload.autocast else "input"


class PrecisionGraph:
    """Precisions of all operators, and the types that follow from them."""

    def __init__(self, workload: Workload, *, results: Results = "input", kind: DeviceKind = "cuda") -> None:
        self.workload, self.results, self.kind = workload, results, kind
        known = workload.__dict__.get("_types")  # asked for often, and a workload does not change
        if known is None:
            self.plain = [plain_precision(operator) for operator in workload.operators]
            self.leaving = [_leaves(operator) for operator in workload.operators]
            self.captured = list(self.leaving)
            arriving = [self._arriving(operator) for operator in workload.operators]
            known = workload.__dict__["_types"] = (self.plain, self.captured, arriving)
        self.plain, self.captured = known[0], known[1]  # never changed
        self.precision, self.leaving = list(self.plain), list(self.captured)
        self.arriving: list[tuple[str, ...]] = list(known[2])

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
        return tuple(self.changed(operator, precision))

    def changed(self, operator: int | str, precision: str | None) -> dict[int, State]:
        """As `set`, with what each of these operators was before."""
        # In forward order an operator comes after all that can reach it: once is enough.
        before: dict[int, State] = {}
        queue: list[int] = []
        for index in self.indices(operator):
            wanted = precision or self.plain[index]
            if wanted != self.precision[index]:
                before[index] = self.state(index)
                self.precision[index] = wanted
                heappush(queue, index)
        while queue:
            index = heappop(queue)
            leaving = self._leaving(self.workload.operators[index])
            if leaving == self.leaving[index]:
                continue
            self.leaving[index] = leaving
            for consumer in self.workload.consumers[index]:
                if consumer not in before:
                    before[consumer] = self.state(consumer)
                    heappush(queue, consumer)
                self.arriving[consumer] = self._arriving(self.workload.operators[consumer])
        return {index: before[index] for index in sorted(before)}

    def state(self, index: int) -> State:
        """Precision, arriving types and leaving type of an operator."""
        return self.precision[index], self.arriving[index], self.leaving[index]

    def restore(self, index: int, state: State) -> None:
        """Take an operator back to what it was."""
        self.precision[index], self.arriving[index], self.leaving[index] = state

    def is_plain(self, index: int) -> bool:
        return bool(self.precision[index] == self.plain[index])

    def computes_in(self, index: int) -> str:
        """The type of an operator's arithmetic."""
        operator = self.workload.operators[index]
        if operator.category == "dependent":
            return promoted(list(self.arriving[index])) or self.captured[index]
        precision: str = self.precision[index]
        return precision

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
        if not self.follows(operator):
            return self._own(operator) or captured
        tensors = [t for t in operator.input_tensors if t.floating]
        arriving = _mixed(operator, tensors, self.arriving[index])
        before = _mixed(operator, tensors, tuple(t.dtype for t in tensors))
        return arriving if arriving is not None and captured == before else captured

    def follows(self, operator: Operator) -> bool:
        """Whether an operator takes the type of its inputs. A batch norm does, with statistics in fp32; on a CPU so do
        other norms and softmax, which compute in fp32."""
        if self.kind == "cuda" and _kernel(operator) in _FULL_ON_GPU:
            return False
        if operator.category == "dependent" or "batch_norm" in operator.target:
            return True
        # A logarithm of softmax is part of a loss, which lifts its input on every device.
        softens = operator.kind == "softmax" and "log_softmax" not in operator.target
        return self.kind == "cpu" and (softens or operator.kind == "norm")

    def _own(self, operator: Operator) -> str | None:
        index = operator.index
        if self.results == "input" or self.is_plain(index) or operator.kind == "embedding":
            return None
        handed_on = passes(self.precision[index])[0] in HANDED_ON and self.captured[index] == "fp32"
        return "bf16" if handed_on else None


def _mixed(operator: Operator, tensors: list[Tensor], types: tuple[str, ...]) -> str | None:
    """The type of the result of an operator that takes the type of its inputs, its parameters included."""
    if operator.kind == "norm":
        return types[0] if types else None
    several = [name for name, tensor in zip(types, tensors, strict=True) if tensor.shape]
    several += [t.dtype for t in operator.parameter_tensors if t.floating and t.shape]
    return promoted(several or list(types))


def _kernel(operator: Operator) -> str:
    return operator.target.removeprefix("aten.").partition(".")[0]


def _leaves(operator: Operator) -> str:
    return operator.outputs[0].dtype if operator.outputs else operator.dtype
