"""Which operators of a captured step tensor parallelism can divide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from trimtab.errors import TrimtabError
from trimtab.sharding.convert import split_of
from trimtab.sharding.find_units import FoundBlock, find_blocks, projections_of
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
    spans = []
    for block in blocks:
        if isinstance(block.kind, Experts):
            experts = _experts(block, block.kind, operators, users)
            if experts is None:
                return ()
            spans.append(experts)
            continue
        names = [f"{block.path}.{name}".lstrip(".") for name in projections_of(block.parent, block.kind)]
        calls = [users.get(f"{name}.weight", []) for name in names]
        if isinstance(block.kind, TorchAttention):
            # One matrix for queries, keys and values: one product, or one for each input.
            calls[:0] = ([index] for index in users.get(f"{block.path}.in_proj_weight".lstrip("."), []))
        if len(calls) < 2 or any(len(indices) != 1 for indices in calls):
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


def _experts(
    block: FoundBlock, kind: Experts, operators: Sequence[Operator], users: Mapping[str, Sequence[int]]
) -> UnitSpan | None:
    """From where tokens are picked for an expert to where its results are added; experts get tokens alike."""
    products = sorted({index for name in kind.names for index in users.get(f"{block.path}.{name}", ())})
    here = [o.index for o in operators if o.name.startswith((f"{block.path}/", f"{block.path}."))]
    if not products or here[-1] <= products[-1]:
        return None
    picked = {
        source
        for index in products
        for source in operators[index].inputs
        if source in here and not set(operators[source].inputs).intersection(products)
    }
    into = sorted({*picked.difference(between(tuple(operators), products, here[-1])), *products})
    return UnitSpan(
        name=block.name,
        units=split_of(block).units,
        into=tuple(into),
        inside=between(tuple(operators), into, here[-1]),
        out=here[-1],
    )
