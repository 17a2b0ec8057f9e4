"""From traced calls to a `Workload`."""

from __future__ import annotations

from collections.abc import Sequence
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


def assemble(
    model: nn.Module,
    calls: Sequence[Call],
    second: Sequence[Call] | None,
    *,
    batch: Sequence[Meta],
    batch_size: int,
    autocast: str | None,
    bucket_cap_mb: float | None,
) -> Workload:
    """The workload of `calls`; `second` are the same calls with one more sample, which shows how shapes grow."""
    resizable = second is not None and _grow_alike(calls, second)
    pairs: Sequence[tuple[Call, Call]]
    pairs = list(zip(calls, second if resizable and second else calls, strict=True))
    writers = {number: i for i, call in enumerate(calls) for number in call.output_storages}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    operators = tuple(
        _operator(i, one, two, writers, _gradients(one, calls, trained)) for i, (one, two) in enumerate(pairs)
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
        batch_size=batch_size,
        batch=tuple(_batch_tensor(meta, batch_size) for meta in batch),
        operators=operators,
        parameters=parameters,
        buckets=ddp_buckets(parameters, operators, bucket_cap_mb),
        bucket_cap_mb=bucket_cap_mb,
        blocks=repeated_blocks(operators),
        units=unit_spans(model, operators),
        buffer_bytes=sum(b.nbytes for b in model.buffers()),
        autocast=autocast,
        resizable=resizable,
    )


def _operator(index: int, one: Call, two: Call, writers: dict[int, int], gradients: int) -> Operator:
    fields: dict[str, Any] = {name: getattr(one, name) for name in _SAME}
    fields |= {name: tuple(getattr(one, name)) for name in _LISTS}
    fields |= {name: tuple(map(_tensor, getattr(one, name), getattr(two, name))) for name in _TENSORS}
    saved = tuple(
        _saved(index, one, number, role, _tensor(meta, other), writers)
        for (number, (role, meta)), (_, other) in zip(one.saved.items(), two.saved.values(), strict=True)
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


def _tensor(one: Meta, two: Meta) -> Tensor:
    growth = tuple(b - a for a, b in zip(one[0], two[0], strict=True))
    return Tensor(shape=one[0], dtype=one[1], growth=growth if any(growth) else ())


def _batch_tensor(meta: Meta, batch_size: int) -> Tensor:
    shape, dtype = meta
    grows = bool(shape) and shape[0] == batch_size
    return Tensor(shape=shape, dtype=dtype, growth=(1,) + (0,) * (len(shape) - 1) if grows else ())


def _grow_alike(ones: Sequence[Call], twos: Sequence[Call]) -> bool:
    """Whether both runs made the same calls, with as many axes, and saved the same tensors."""

    def outline(call: Call) -> tuple[Any, ...]:
        metas = (
            call.input_tensors,
            call.outputs,
            call.parameter_tensors,
            [m for _, m in call.saved.values()],
        )
        axes = [[(len(shape), dtype) for shape, dtype in group] for group in metas]
        roles = [role for role, _ in call.saved.values()]
        return call.name, call.target, call.inputs, call.parameters, axes, roles

    return len(ones) == len(twos) and all(outline(a) == outline(b) for a, b in zip(ones, twos, strict=True))
