"""From traced calls to a `Workload`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trimtab.measure.capture.call import DTYPES, Call, Meta
from trimtab.measure.capture.units import unit_spans
from trimtab.workload.blocks import repeated_blocks
from trimtab.workload.buckets import ddp_buckets
from trimtab.workload.operator import OUTSIDE, Operator, Saved
from trimtab.workload.tensor import FLOATS, Tensor
from trimtab.workload.workload import SCHEMA_VERSION, Parameter, Workload

_SAME = ("name", "kind", "module", "target", "setting", "arguments", "differentiable", "views")
_LISTS = ("inputs", "input_storages", "output_storages", "parameters")
_TENSORS = ("input_tensors", "outputs", "parameter_tensors")
"""Fields that a call and its operator share: as they are, as tuples, and as tensors that grow with the batch."""


@dataclass(frozen=True)
class Captured:
    """The calls of a step with so many samples."""

    samples: int
    calls: Sequence[Call]


def assemble(
    model: nn.Module,
    captured: Captured,
    other: Captured | None,
    *,
    batch: Sequence[Meta],
    autocast: str | None,
    bucket_cap_mb: float | None,
) -> Workload:
    """The workload of captured calls; another batch size shows how shapes grow.

    Calls are matched by name. One that the other batch size does not make, or makes with other arguments, is taken
    to grow from nothing there to what it is here; the workload's `caveat` says so.
    """
    calls = captured.calls
    matches = _matches(calls, other.calls) if other is not None else [None] * len(calls)
    more = other.samples - captured.samples if other is not None else 0
    writers = {number: i for i, call in enumerate(calls) for number in call.output_storages}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    operators = tuple(
        _operator(i, one, two, more, writers, _gradients(one, calls, trained))
        for i, (one, two) in enumerate(zip(calls, matches, strict=True))
    )
    users: dict[str, list[int]] = {}
    for operator in operators:
        for name in dict.fromkeys(operator.parameters):
            users.setdefault(name, []).append(operator.index)
    parameters = tuple(
        Parameter(
            name=name,
            tensor=Tensor(shape=tuple(p.shape), dtype=DTYPES[p.dtype]),
            operators=tuple(users.get(name, ())),
            trainable=p.requires_grad,
        )
        for name, p in model.named_parameters()
    )
    return Workload(
        version=SCHEMA_VERSION,
        model=type(model).__name__,
        batch_size=captured.samples,
        batch=tuple(_batch_tensor(meta, captured.samples) for meta in batch),
        operators=operators,
        parameters=parameters,
        buckets=ddp_buckets(parameters, operators, bucket_cap_mb),
        bucket_cap_mb=bucket_cap_mb,
        blocks=repeated_blocks(operators),
        units=unit_spans(model, operators),
        buffer_bytes=sum(b.nbytes for b in model.buffers()),
        autocast=autocast,
        resizable=other is not None,
        caveat=None if other is None else _caveat(captured, other, operators),
    )


def grow_alike(one: Captured, two: Captured) -> bool:
    """Whether both make the same calls, with as many axes, and save the same tensors."""
    return [(_outline(a), a.inputs) for a in one.calls] == [(_outline(b), b.inputs) for b in two.calls]


def _outline(call: Call) -> tuple[Any, ...]:
    metas = (call.input_tensors, call.outputs, call.parameter_tensors, [m for _, m in call.saved.values()])
    axes = [[(len(shape), dtype) for shape, dtype in group] for group in metas]
    roles = [role for role, _ in call.saved.values()]
    return call.name, call.target, call.parameters, axes, roles


def _matches(ones: Sequence[Call], twos: Sequence[Call]) -> list[Call | None]:
    by_outline = {repr(_outline(call)): call for call in twos}
    return [by_outline.get(repr(_outline(call))) for call in ones]


def _caveat(one: Captured, two: Captured, operators: Sequence[Operator]) -> str | None:
    uneven = [
        o.name
        for o in operators
        if any(isinstance(step, float) for t in (*o.input_tensors, *o.outputs) for step in t.growth)
    ]
    if not uneven:
        return None
    low, high = sorted((one.samples, two.samples))
    return (
        f"{len(uneven)} of {len(operators)} operators ({uneven[0]}, ...) do not grow evenly with the batch: between "
        f"{low} and {high} samples they are interpolated"
    )


def _operator(
    index: int, one: Call, two: Call | None, more: int, writers: dict[int, int], gradients: int
) -> Operator:
    def tensors(name: str) -> tuple[Tensor, ...]:
        metas: list[Meta] = getattr(one, name)
        if two is not None:
            return tuple(
                _tensor(meta, other, more) for meta, other in zip(metas, getattr(two, name), strict=True)
            )
        return tuple(_tensor(meta, meta if name == "parameter_tensors" else None, more) for meta in metas)

    fields: dict[str, Any] = {name: getattr(one, name) for name in _SAME}
    fields |= {name: tuple(getattr(one, name)) for name in _LISTS}
    fields |= {name: tensors(name) for name in _TENSORS}
    others = [None] * len(one.saved) if two is None else [meta for _, meta in two.saved.values()]
    saved = tuple(
        _saved(index, one, number, role, _tensor(meta, other, more), writers)
        for (number, (role, meta)), other in zip(one.saved.items(), others, strict=True)
    )
    return Operator(index=index, saved=saved, gradients=gradients, **fields)


def _gradients(call: Call, calls: Sequence[Call], trained: set[str]) -> int:
    """How many operands need a gradient, at most two; a bias does not count."""
    flowing = sum(1 for i, (_, dtype) in zip(call.inputs, call.input_tensors, strict=True)
                  if i != OUTSIDE and calls[i].differentiable and dtype in FLOATS)  # fmt: skip
    weights = sum(1 for name, (shape, _) in zip(call.parameters, call.parameter_tensors, strict=True)
                  if name in trained and len(shape) > 1)  # fmt: skip
    return min(2, flowing + weights) if call.differentiable else 0


def _saved(index: int, call: Call, number: int, role: Any, tensor: Tensor, writers: dict[int, int]) -> Saved:
    if role == "other" and number in call.output_storages:
        role = "output"
    inside = OUTSIDE if number in call.input_storages else index
    return Saved(role=role, producer=writers.get(number, inside), storage=number, tensor=tensor)


def _tensor(one: Meta, two: Meta | None, more: int) -> Tensor:
    """A tensor, and what it is with so many more samples: None if it does not exist there."""
    shape, dtype = one
    other = (0, *shape[1:]) if two is None and shape else shape if two is None else two[0]
    steps = [(b - a, more) for a, b in zip(shape, other, strict=True)]
    growth = tuple(
        step // of if of and step % of == 0 and two is not None else step / of if of else 0
        for step, of in steps
    )
    return Tensor(shape=shape, dtype=dtype, growth=growth if any(growth) else ())


def _batch_tensor(meta: Meta, batch_size: int) -> Tensor:
    shape, dtype = meta
    grows = bool(shape) and shape[0] == batch_size
    return Tensor(shape=shape, dtype=dtype, growth=(1,) + (0,) * (len(shape) - 1) if grows else ())
