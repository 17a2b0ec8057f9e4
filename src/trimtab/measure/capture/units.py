"""Which operators of a captured step tensor parallelism can divide."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trimtab.errors import TrimtabError
from trimtab.sharding.convert import split_of
from trimtab.sharding.find_units import find_blocks, projections_of
from trimtab.sharding.unit_kinds import Experts, TorchAttention
from trimtab.workload.operator import Operator
from trimtab.workload.units import between
from trimtab.workload.workload import UnitSpan


def unit_spans(model: nn.Module, operators: Sequence[Operator]) -> tuple[UnitSpan, ...]:
    """The blocks that `trimtab.tensor_parallel` would divide as they are; none if it would refuse the model."""
    try:
        blocks, _ = find_blocks(model, {}, ())
    except TrimtabError:
        return ()
    users: dict[str, list[int]] = {}
    for operator in operators:
        for name in operator.parameters:
            users.setdefault(name, []).append(operator.index)
    if any(isinstance(block.kind, (TorchAttention, Experts)) for block in blocks):
        return ()  # their products are not those of linear maps
    spans = []
    for block in blocks:
        names = [f"{block.path}.{name}".lstrip(".") for name in projections_of(block.parent, block.kind)]
        calls = [users.get(f"{name}.weight", []) for name in names]
        if any(len(indices) != 1 for indices in calls):
            return ()  # a block that is called twice, or under another name
        *into, out = (index for (index,) in calls)
        if out <= max(into):
            return ()
        spans.append(
            UnitSpan(
                name=block.name,
                units=split_of(block).units,
                into=tuple(into),
                inside=between(tuple(operators), into, out),
                out=out,
            )
        )
    return tuple(sorted(spans, key=lambda span: span.out))
