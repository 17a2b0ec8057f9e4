"""The full cost of a change of precision: of the operator itself, the casts around it, and the operators after it.

`CostMapper` holds every operator's forward and backward time in the current precisions. A change recomputes only
what it affects, and can be undone exactly.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING

from trimtab.precision_names import ATTENTION, NOT_ON_GPUS
from trimtab.predict.operators.costs import DeviceCosts, OperatorKey, key_of
from trimtab.predict.operators.low_precision import (
    DeviceKind,
    backward_casts,
    forward_casts,
    passes,
    values_of,
)
from trimtab.predict.operators.precision_graph import PrecisionGraph, Results, State, promoted, results_of
from trimtab.predict.precision_patterns import matched, settable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from trimtab.cluster.profile import OperatorTime
    from trimtab.predict.operators.low_precision import Cast
    from trimtab.workload import Operator, Workload


@dataclass(frozen=True, kw_only=True)
class Change:
    """The effect of setting a precision, and what is needed to undo it."""

    operator: int | str
    precision: str | None
    forward_s: float
    """Difference of the forward pass; negative if it became faster."""

    backward_s: float
    touched: tuple[int, ...]
    """Every operator whose time may have changed."""

    before: tuple[tuple[State, float, float], ...]
    """For each of these, before the change: its state, forward and backward seconds."""

    @property
    def delta_s(self) -> float:
        return self.forward_s + self.backward_s


class CostMapper:
    """Times of a workload's operators on one device class."""

    def __init__(
        self,
        workload: Workload,
        costs: DeviceCosts,
        *,
        kind: DeviceKind = "cpu",
        precisions: Mapping[str, str] | None = None,
        results: Results | None = None,
        probed: Results | None = None,
        naive: bool = False,
    ) -> None:
        """
        Args:
            precisions: by pattern, as `trimtab.set_precision` takes them.
            results: type of results; by default what `trimtab.precision` hands on, if the casts for it were measured.
            probed: type of results in the steps that were measured; by default `results`.
            naive: ignore casts and neighbors, as simpler predictors do; for comparison.

        Raises:
            TrimtabError: naming the first operator or cast that was not measured.
        """
        self.workload, self.costs, self.kind, self.naive = workload, costs, kind, naive
        results = results or results_of(workload, costs.casts)
        self.graph = PrecisionGraph(workload, results=results, kind=kind)
        self._probed: dict[str, PrecisionGraph] = {}
        self._probed_results = probed or results
        self._known: dict[tuple[int, State], tuple[float, float]] = {}
        self._undoable: list[Change] = []
        self.original: CostMapper | None = None
        """The mapper that this one is an unchanged copy of."""
        if precisions:
            for name, precision in matched(workload, precisions).items():
                self.graph.set(name, precision)
        times = [self._times(index) for index in range(len(workload.operators))]
        self.forward_s = [forward for forward, _ in times]
        self.backward_s = [backward for _, backward in times]

    def copy(self) -> CostMapper:
        """A mapper in the same precisions that can be changed by itself."""
        other = copy(self)
        other.original = self.original or self
        other.graph, other._undoable = self.graph.copy(), []
        other.forward_s, other.backward_s = list(self.forward_s), list(self.backward_s)
        return other

    @property
    def total_s(self) -> float:
        """Forward and backward of all operators together."""
        return fsum(self.forward_s) + fsum(self.backward_s)

    @property
    def precisions(self) -> dict[str, str]:
        """Precisions that differ from plain, by the name that sets them."""
        return {
            name: self.graph.precision[indices[0]]
            for name, indices in self.workload.settings.items()
            if not self.graph.is_plain(indices[0])
        }

    def change(self, operator: int | str, precision: str | None) -> Change:
        """Set an operator (with all calls of the same module) to a precision; None for plain.

        Raises:
            TrimtabError: something was not measured; nothing has changed then.
        """
        graph = self.graph
        states = graph.changed(operator, precision)
        touched = tuple(states)
        try:
            times = [self._times(index) for index in touched]
        except Exception:
            for index, state in states.items():
                graph.restore(index, state)
            raise
        before = tuple((states[i], self.forward_s[i], self.backward_s[i]) for i in touched)
        forward = fsum(new[0] for new in times) - fsum(self.forward_s[i] for i in touched)
        backward = fsum(new[1] for new in times) - fsum(self.backward_s[i] for i in touched)
        for index, (one, two) in zip(touched, times, strict=True):
            self.forward_s[index], self.backward_s[index] = one, two
        change = Change(
            operator=operator,
            precision=precision,
            forward_s=forward,
            backward_s=backward,
            touched=touched,
            before=before,
        )
        self._undoable.append(change)
        self.original = None
        return change

    def undo(self, change: Change) -> None:
        """Undo the last change that was not undone yet, exactly."""
        assert self._undoable, "there is nothing to undo"
        assert self._undoable[-1] is change, "changes are undone in reverse order"
        self._undoable.pop()
        for index, (state, forward, backward) in zip(change.touched, change.before, strict=True):
            self.graph.restore(index, state)
            self.forward_s[index], self.backward_s[index] = forward, backward

    def keys(self) -> Iterator[OperatorKey]:
        """The key of every operator in its current precision: what must have been measured."""
        for operator in self.workload.operators:
            yield key_of(operator, self.graph.precision[operator.index])

    def _times(self, index: int) -> tuple[float, float]:
        state = self.graph.state(index)
        times = self._known.get((index, state))
        if times is None:
            operator = self.workload.operators[index]
            times = self._known[index, state] = self._costed(operator, state)
        return times

    def _costed(self, operator: Operator, state: State) -> tuple[float, float]:
        precision, arriving, leaving = state
        plain = precision == self.graph.plain[operator.index]
        usual = tuple(t.dtype for t in operator.input_tensors if t.floating)
        as_captured = arriving == usual and leaving == self.graph.captured[operator.index]
        if operator.category == "adjustable" and not plain:
            return self._set(operator, precision, arriving, leaving)
        times = self._measured(operator, key_of(operator))
        if as_captured or self.naive:
            return times.forward_s, times.backward_s
        wanted = usual
        if self.graph.follows(operator):
            own = promoted(list(arriving)) or operator.dtype
            # Where it was not measured in that type, it is assumed to take as long as in its own.
            times = self.costs.operators.get(str(key_of(operator, dtype=own)), times)
            wanted = (own,) * len(arriving)
        extra = [
            (source, target, tensor.numel)
            for source, target, tensor in zip(arriving, wanted, values_of(operator), strict=True)
            if source != target
        ]
        before = fsum(self._cast(source, target, n) for source, target, n in extra)
        after = fsum(self._cast(target, source, n) for source, target, n in extra)
        return times.forward_s + before, times.backward_s + (after if operator.differentiable else 0.0)

    def _set(
        self, operator: Operator, precision: str, arriving: tuple[str, ...], leaving: str
    ) -> tuple[float, float]:
        """Time in a precision that was set, split into product and casts if other types arrive than were measured."""
        times = self._measured(operator, key_of(operator, precision))
        probed, index = self._as_probed(precision), operator.index
        if (arriving, leaving) == (probed.arriving[index], probed.leaving[index]) and not self.naive:
            return times.forward_s, times.backward_s
        usual, left = promoted(list(probed.arriving[index])) or operator.dtype, probed.leaving[index]
        forward = times.forward_s - self._casts(forward_casts(operator, precision, usual, left))
        backward = times.backward_s - self._casts(backward_casts(operator, precision, usual, left, self.kind))
        # The fitted cast may exceed the whole time of a small operator.
        forward, backward = max(0.0, forward), max(0.0, backward)
        if self.naive:
            return forward, backward
        now = promoted(list(arriving)) or usual
        forward += self._casts(forward_casts(operator, precision, now, leaving))
        backward += self._casts(backward_casts(operator, precision, now, leaving, self.kind))
        return forward, backward

    def _as_probed(self, precision: str) -> PrecisionGraph:
        """The types in a probed step: all operators that can have the precision have it."""
        if precision not in self._probed:
            graph = PrecisionGraph(self.workload, results=self._probed_results, kind=self.kind)
            if graph.results == "own":
                for name, (first, *_) in self.workload.settings.items():
                    kind = self.workload.operators[first].kind
                    without = NOT_ON_GPUS.get(kind, ()) if self.kind == "cuda" else ()
                    offered = set(settable(kind)) - set(without)
                    if not name.endswith(ATTENTION) and set(passes(precision)) <= offered:
                        graph.set(name, precision)
            self._probed[precision] = graph
        return self._probed[precision]

    def _measured(self, operator: Operator, key: OperatorKey) -> OperatorTime:
        return self.costs.times(key, operator.name)

    def _casts(self, casts: Iterable[Cast]) -> float:
        return fsum(self._cast(*cast) for cast in casts)

    def _cast(self, source: str, target: str, elements: int) -> float:
        return self.costs.cast(source, target).seconds(elements)
