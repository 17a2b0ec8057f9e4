"""What a block uses of the rest of a model, and the rest of the block, beside its input and its output.

A block is compared with the unsplit one as the module that computes it, with that module's own parameters and
arguments. So whatever comes into it or leaves it by another way is looked for in the graph of the whole trace:

- a parameter of another module between its projections, of which a rank would have the gradient of its units only;
- a projection's weight that something else reads, which would get this rank's part of it;
- hidden values, or values by head, that something else reads, which would get those of this rank's units.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from trimtab.sharding.structure.trace import Trace

_BY_HEAD = 4
"""Dimensions of activations by head: (samples, heads, places, width or places)."""


class Uses:
    """The graph of a trace behind everything but the blocks' own values."""

    def __init__(self, model: nn.Module, trace: Trace, blocks: Iterable[tuple[str, str]]) -> None:
        """
        Args:
            blocks: for each block the names of the module that computes it and, inside, of its last projection.
        """
        self._trace = trace
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._outs = {_joined(path, out) for path, out in blocks}
        roots = [call.x for call in trace.order if call.path not in self._outs]
        self._nodes = _reached([*roots, *trace.outputs], ())
        self._read = {id(p) for p in _parameters(self._nodes)}

    def problem(self, parent: nn.Module, path: str, projections: dict[str, nn.Module]) -> str:
        """Why a block cannot be divided, empty if it can."""
        last = self._trace.first.get(_joined(path, list(projections)[-1]))
        if last is None:
            return ""
        own = {id(p) for p in parent.parameters()}
        inside = _parameters(_reached([last.x], self._trace.entries.get(path, ())))
        foreign = sorted(self._names[id(p)] for p in inside if id(p) not in own and id(p) in self._names)
        if foreign:
            what = f"{_listed(foreign)} of another module"
            return f"{what} is used between its projections, so its gradient would be wrong"
        for name, projection in projections.items():
            inner = _joined(path, name)
            call = self._trace.linears.get(inner)
            if call is not None and call.path not in self._outs and id(call.y) in self._read:
                return f"outputs of {inner} are also used outside of it, where every rank would have a part of them"
            if inner in self._trace.linears and any(id(p) in self._read for p in projection.parameters()):
                return f"a parameter of {inner} is also used outside of it, where every rank would have a part of it"
        return ""

    def keeps_heads(self, path: str) -> bool:
        """Whether nothing outside a module uses what it returns by head."""
        results, ended = self._trace.results.get(path, ([], 0))
        nodes = {t.grad_fn for t in results if t.ndim == _BY_HEAD}
        return not nodes & self._nodes and not any(
            n >= ended and node in nodes for n, node in self._trace.given
        )


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}".strip(".")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _reached(values: Iterable[Tensor], stops: Iterable[Any]) -> set[Any]:
    """The nodes of the graph that leads to some values, up to some nodes."""
    seen = {node for node in stops if node is not None}
    stopped = set(seen)
    waiting = [value.grad_fn for value in values]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return seen - stopped


def _parameters(nodes: Iterable[Any]) -> list[Tensor]:
    return [node.variable for node in nodes if hasattr(node, "variable")]
