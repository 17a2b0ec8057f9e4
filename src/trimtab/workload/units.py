"""The part of a step that a tensor-parallel rank computes: some of the units of every block."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from trimtab.workload.buckets import ddp_buckets
from trimtab.workload.operator import Operator
from trimtab.workload.tensor import Tensor
from trimtab.workload.workload import UnitSpan, Workload


def between(operators: tuple[Operator, ...], into: Collection[int], out: int) -> tuple[int, ...]:
    """The operators on the way from a block's first projections to its last."""
    reached, inside = set(into), []
    for operator in operators[min(into) : out]:
        if operator.index not in into and reached.intersection(operator.inputs):
            reached.add(operator.index)
    needed = set(operators[out].inputs)
    for operator in reversed(operators[min(into) : out]):
        if operator.index in needed:
            needed.update(operator.inputs)
            if operator.index in reached and operator.index not in into:
                inside.append(operator.index)
    return tuple(reversed(inside))


def shares_of(workload: Workload, counts: Mapping[str, int]) -> dict[int, float]:
    """For every operator inside a block, the part of its work that a rank with so many units of each block does."""
    return {
        index: counts[span.name] / span.units
        for span in workload.units
        for index in (*span.into, *span.inside, span.out)
    }


def sharded(workload: Workload, counts: Mapping[str, int]) -> Workload:
    """The step of a tensor-parallel rank with so many units of each block.

    Sizes are exact for parameters and for activations as numbers of elements; which axis of an activation became
    shorter is a guess.
    """
    operators = list(workload.operators)
    parameters = {p.name: p for p in workload.parameters}
    for span in workload.units:
        count = counts[span.name]
        shortened: set[str] = set()  # cross-attention multiplies with parts of one matrix
        made_here = {*span.into, *span.inside}
        for index in (*span.into, *span.inside, span.out):
            operators[index] = _narrowed(operators[index], span, count, made_here)
        for index in (*span.into, span.out):
            for name in _sharded_parameters(workload.operators[index], span):
                if name in shortened:
                    continue
                shortened.add(name)
                own = parameters[name]
                parameters[name] = replace(own, tensor=_shortened(own.tensor, span.units, count))
    small = tuple(parameters.values())
    return replace(
        workload,
        operators=tuple(operators),
        parameters=small,
        buckets=ddp_buckets(small, operators, workload.bucket_cap_mb),
    )


def _sharded_parameters(operator: Operator, span: UnitSpan) -> tuple[str, ...]:
    """The bias of the last projection is added once, on every rank."""
    if operator.index != span.out:
        return operator.parameters
    return tuple(
        name
        for name, t in zip(operator.parameters, operator.parameter_tensors, strict=True)
        if len(t.shape) > 1
    )


def _narrowed(operator: Operator, span: UnitSpan, count: int, made_here: set[int]) -> Operator:
    def small(tensor: Tensor) -> Tensor:
        return _shortened(tensor, span.units, count)

    last = operator.index == span.out
    return replace(
        operator,
        input_tensors=tuple(
            small(t) if producer in made_here else t
            for producer, t in zip(operator.inputs, operator.input_tensors, strict=True)
        ),
        outputs=operator.outputs if last else tuple(map(small, operator.outputs)),
        parameter_tensors=tuple(
            small(t) if len(t.shape) > 1 or not last else t for t in operator.parameter_tensors
        ),
        saved=tuple(
            replace(s, tensor=small(s.tensor)) if s.producer in made_here else s for s in operator.saved
        ),
    )


def _shortened(tensor: Tensor, units: int, count: int) -> Tensor:
    """With the last axis shortened that holds whole units and does not grow with the batch, or else the longest one."""
    growth = tensor.growth or (0,) * len(tensor.shape)
    fitting = [i for i, size in enumerate(tensor.shape) if size and size % units == 0 and not growth[i]]
    if not tensor.shape:
        return tensor
    axis = (
        fitting[-1]
        if fitting
        else max(range(len(tensor.shape)), key=lambda i: (not growth[i], tensor.shape[i]))
    )
    size = -(-tensor.shape[axis] * count // units)
    return replace(tensor, shape=(*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]))
