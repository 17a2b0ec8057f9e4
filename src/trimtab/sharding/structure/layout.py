"""Read the units of a model off its trace.

A linear map is the end of a block if its inputs are computed from the outputs of some other maps and from nothing else
of the layer's activations, and those outputs are used nowhere else. The inputs that depend on a common output form one
unit: in attention the heads that share a key and a value, in an MLP a single hidden unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor, nn

from trimtab.sharding.structure.example import repeated_layers
from trimtab.sharding.structure.linear import features
from trimtab.sharding.structure.trace import LinearCall, Trace
from trimtab.sharding.unit_axis import UnitAxis
from trimtab.sharding.unit_kinds import Units

_TRIED = 32
"""Hidden units tried until one is not switched off by its activation function."""


class NotUnitsError(Exception):
    """Why the maps before a linear map do not form units with it."""


def find_units(
    model: nn.Module, trace: Trace, taken: set[str]
) -> tuple[list[tuple[str, Units]], dict[str, str]]:
    """(name of the module that computes it, its units) of every block in the repeated layers, in order.

    Also the reason for every linear map there that is in no block.

    Args:
        taken: names of linear maps that are in a block already, or to be replicated.
    """
    found: list[tuple[str, Units]] = []
    reasons: dict[str, str] = dict.fromkeys(trace.repeated, "it is called more than once")
    used = set(taken)
    for prefix in repeated_layers(model):
        calls = [c for c in trace.linears.values() if not prefix or c.path.startswith(f"{prefix}.")]
        sources = {call.path: list(_sources(trace, call, calls)) for call in calls}
        for call in calls:
            if not call.x.requires_grad:
                reasons[call.path] = (
                    "it runs without a graph (torch.no_grad, or reentrant activation checkpointing)"
                )
            if call.path in used or not sources[call.path]:
                continue
            if _is_bottleneck(model, call, sources[call.path]):
                reasons[call.path] = "its few inputs are a bottleneck (an adapter), not worth a collective"
                continue
            try:
                path, units = _block(model, trace, call, sources, used)
            except NotUnitsError as problem:
                reasons[call.path] = str(problem)
            else:
                found.append((path, units))
                used |= {f"{path}.{name}".lstrip(".") for name in (units.out, *units.parts)}
        for call in calls:
            if call.path not in used:
                reasons.setdefault(call.path, "its outputs are not the hidden units of a block")
    return found, {name: reason for name, reason in reasons.items() if name not in used}


def _sources(trace: Trace, call: LinearCall, calls: list[LinearCall]) -> Iterator[LinearCall]:
    """The maps whose outputs reach this one's inputs without another map in between."""
    earlier = calls[: calls.index(call)]
    for other, gradient in zip(
        earlier, trace.gradients(call, [c.y for c in earlier], slice(None)), strict=True
    ):
        if gradient is not None:
            yield other


def _is_bottleneck(model: nn.Module, call: LinearCall, ins: list[LinearCall]) -> bool:
    """Whether the hidden units are few beside what goes in and out, as those of low-rank adapters are."""
    hidden, outputs = features(model.get_submodule(call.path))
    return 2 * hidden <= min(outputs, *(features(model.get_submodule(each.path))[0] for each in ins))


def _block(
    model: nn.Module, trace: Trace, call: LinearCall, sources: dict[str, list[LinearCall]], used: set[str]
) -> tuple[str, Units]:
    ins = sources[call.path]
    for source in ins:
        if source.path in used:
            raise NotUnitsError(f"its inputs come from {source.path}, which ends another block")
        users = [name for name, reached in sources.items() if source in reached]
        if len(users) > 1:
            raise NotUnitsError(f"outputs of {source.path} are used by {' and '.join(users)}")
    path = _common([call.path, *(source.path for source in ins)])
    widths = {features(model.get_submodule(source.path))[0] for source in ins}
    activations = [x for x in trace.inputs.get(path, []) if 0 < x.ndim <= 3 and x.shape[-1] in widths]
    if any(g is not None for g in trace.gradients(call, activations, slice(None))):
        raise NotUnitsError("its inputs also depend on activations that pass by the hidden units")
    start = len(path) + 1 if path else 0
    units = _Rows(trace, call, ins).units()
    return path, Units(
        ins=tuple((source.path[start:], parts) for source, parts in zip(ins, units.parts, strict=True)),
        out=call.path[start:],
        width=units.width,
        heads=units.heads,
        inside=tuple(inside_of(model, trace, call, path)),
    )


def inside_of(
    model: nn.Module, trace: Trace, call: LinearCall, path: str
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Modules with parameters of their own between the projections of a block, such as a norm of the queries by head.

    Each with the names of these parameters.

    Args:
        call: of the block's last projection.
        path: of the module that computes the block; the names are those inside it.
    """
    start = len(path) + 1 if path else 0
    for name, module in model.get_submodule(path).named_modules(prefix=path):
        if name in trace.first:
            continue
        own = dict(module.named_parameters(recurse=False))
        gradients = trace.gradients(call, list(own.values()), slice(None))
        inside = tuple(each for each, g in zip(own, gradients, strict=True) if g is not None)
        if inside:
            yield name[start:], inside


def _common(paths: list[str]) -> str:
    """Name of the innermost module that contains all of these."""
    parts = [path.split(".")[:-1] for path in paths]
    depth = 0
    while all(len(p) > depth for p in parts) and len({p[depth] for p in parts}) == 1:
        depth += 1
    return ".".join(parts[0][:depth])


class _Units:
    def __init__(self, width: int, heads: int, parts: list[tuple[int, ...]]) -> None:
        self.width, self.heads, self.parts = width, heads, parts


class _Rows:
    """Which outputs of the maps into a block each input of the map out of it depends on."""

    def __init__(self, trace: Trace, call: LinearCall, ins: list[LinearCall]) -> None:
        self._trace, self._call, self._ins = trace, call, ins
        self._hidden = call.x.shape[-1]

    def of(self, channels: slice) -> list[list[int]]:
        gradients = self._trace.gradients(self._call, [source.y for source in self._ins], channels)
        return [_nonzero(g) for g in gradients]

    def units(self) -> _Units:
        first, rows = 0, self.of(slice(0, 1))
        while not all(rows) and first < min(_TRIED, self._hidden) - 1:
            first += 1
            rows = self.of(slice(first, first + 1))
        width = self._width(first, rows)
        if self._hidden % width:
            raise NotUnitsError(f"its {self._hidden} inputs are no multiple of {width}, those of one unit")
        units = self._hidden // width
        if units == 1:
            raise NotUnitsError("all its inputs depend on common values: they form a single unit")
        place = first // width
        of_unit = self.of(slice(place * width, (place + 1) * width)) if width > 1 else rows
        parts = [self._parts(r, units, place, s) for r, s in zip(of_unit, self._ins, strict=True)]
        if width == 1:
            return _Units(1, 0, parts)
        # One output of attention depends on a head of queries, one of keys, and one value of each position.
        dim = max(map(len, rows)) if len(rows) > 1 else (len(rows[0]) - 1) // 2
        return _Units(width, width // dim if dim and width % dim == 0 else 1, parts)

    def _width(self, first: int, rows: list[list[int]]) -> int:
        """Number of consecutive inputs that depend on common outputs."""

        def joined(channel: int) -> bool:
            other = self.of(slice(channel, channel + 1))
            return any(set(a) & set(b) for a, b in zip(rows, other, strict=True))

        if first + 1 >= self._hidden or not joined(first + 1):
            return 1
        if first:
            raise NotUnitsError("some of its inputs depend on no output")
        low, high = 1, self._hidden
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if joined(middle) else (low, middle)
        return low + 1

    def _parts(self, rows: list[int], units: int, place: int, source: LinearCall) -> tuple[int, ...]:
        """Entries of one unit in each part of a projection's outputs, from the rows of one unit."""
        if not rows:
            raise NotUnitsError(f"some of its inputs do not depend on {source.path}")
        ends = [i + 1 for i, (a, b) in enumerate(pairwise(rows)) if b != a + 1]
        parts = tuple(b - a for a, b in pairwise([0, *ends, len(rows)]))
        axis = UnitAxis(units=units, axis=0, parts=parts)
        expected = [row for start, length in axis.boxes(place, 1) for row in range(start, start + length)]
        if axis.length != source.y.shape[-1] or expected != rows:
            raise NotUnitsError(f"the outputs of {source.path} are not in the order of units")
        return parts


def _nonzero(gradient: Tensor | None) -> list[int]:
    if gradient is None:
        return []
    rows: list[int] = gradient.abs().flatten(0, -2).sum(0).nonzero().flatten().tolist()
    return rows
