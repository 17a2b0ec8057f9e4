"""Find the blocks of units in a model, and why the rest of its layers has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from trimtab.errors import TrimtabError
from trimtab.sharding.structure.example import TORCH_LAYERS, repeated_layers
from trimtab.sharding.structure.functional import functional_kind
from trimtab.sharding.structure.layout import find_units, inside_of
from trimtab.sharding.structure.linear import features, is_linear
from trimtab.sharding.structure.trace import Call, Trace, trace_model
from trimtab.sharding.structure.uses import Uses
from trimtab.sharding.unit_kinds import (
    ATTENTIONS,
    MLPS,
    OWN_GPTS,
    TORCH_MLP,
    AnyKind,
    Attention,
    Experts,
    Mlp,
    TorchAttention,
    UnitKind,
    Units,
)

_ELEMENTWISE = (
    nn.GELU, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Hardswish,
    nn.Softplus, nn.Identity, nn.Dropout,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FoundBlock:
    """A block of units in a model that is not yet converted."""

    name: str
    parent: nn.Module
    path: str
    """Name of the parent in the model."""
    kind: AnyKind
    declared: bool
    """Whether the user declared the kind: then it is refused, not replicated, if it does not work."""
    call: Call | None = None
    """Arguments of the parent, to try it with; None if it has not been run."""
    inside: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Modules and those of their parameters that every unit uses: a rank's gradient of them is that of its units."""
    problem: str = ""
    """Why it cannot be divided, as far as the rest of the model says."""
    keeps_heads: bool = True
    """Whether nothing else uses what it returns by head."""


def find_blocks(
    model: nn.Module, extra: Mapping[type[nn.Module], UnitKind | Sequence[UnitKind]], replicate: Sequence[str]
) -> tuple[list[FoundBlock], dict[str, str]]:
    """Every block of units in a model, in order, and why each other linear map of its layers has no units.

    In this order: what the user declares, modules that are known by name, torch's attention and experts, and
    whatever a trace of the model shows (`trimtab.sharding.structure.layout`).
    """
    found: list[tuple[str, AnyKind, bool]] = []
    reasons: dict[str, str] = {}
    covered: set[nn.Module] = set()
    for path, module in model.named_modules():
        if any(fnmatchcase(path, pattern) for pattern in replicate):
            covered.update(module.modules())
        if module in covered:
            continue
        for kind in _kinds_of(module, extra):
            # Names that others may use as well say little.
            declared = isinstance(module, tuple(extra)) or kind is OWN_GPTS[1]
            found.append((path, kind, declared))
            covered.update(projections_of(module, kind).values())
        functional = functional_kind(module)
        if isinstance(functional, str):
            reasons[path] = functional
        elif functional is not None:
            found.append((path, functional, False))
        if functional is not None:
            covered.update(module.modules())
    trace = trace_model(model)
    names = {id(module): name for name, module in model.named_modules()}
    if trace.problem:
        reasons.update(_unseen(model, trace, covered))
    units, without = find_units(model, trace, {names[id(module)] for module in covered})
    found += [(path, kind, False) for path, kind in units]
    reasons.update(without)
    return _named(model, found, trace), reasons


def refuse_shared(model: nn.Module, blocks: Sequence[FoundBlock]) -> None:
    """Raise if a matrix is shared with another module: it cannot be sharded by units."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for each in blocks:
        projections = projections_of(each.parent, each.kind).values()
        own = [parameter for projection in projections for parameter in projection.parameters()]
        if isinstance(each.kind, (TorchAttention, Experts)):
            own += each.parent.parameters(recurse=False)
        for parameter in own:
            if len(names[id(parameter)]) > 1:
                raise TrimtabError(
                    f"tensor_parallel: {' and '.join(names[id(parameter)])} are one tensor, which cannot be "
                    f"sharded by units; replicate it with replicate=[{each.path!r}]"
                )


def _unseen(model: nn.Module, trace: Trace, covered: set[nn.Module]) -> Iterator[tuple[str, str]]:
    """The linear maps of layers that a trace has not reached."""
    for prefix, layer in repeated_layers(model).items():
        for name, module in layer.named_modules(prefix=prefix):
            if is_linear(module) and module not in covered and name not in trace.linears:
                yield name, trace.problem


def _named(model: nn.Module, found: list[tuple[str, AnyKind, bool]], trace: Trace) -> list[FoundBlock]:
    """The blocks in the order of the model, by the name of their parent; "attention" and "mlp" tell two apart."""
    order = {name: index for index, name in enumerate(dict(model.named_modules()))}
    found = sorted(found, key=lambda each: order[f"{each[0]}.{each[1].out}".strip(".")])
    paths = [path for path, _, _ in found]
    uses = Uses(model, trace, [(path, kind.out) for path, kind, _ in found])
    blocks = []
    for path, kind, declared in found:
        alone = paths.count(path) == 1 and not any(p != path and p.startswith(f"{path}.") for p in paths)
        is_mlp = isinstance(kind, Mlp) or (isinstance(kind, Units) and kind.heads == 0)
        name = path if alone else f"{path}.{'mlp' if is_mlp else 'attention'}".lstrip(".")
        parent = model.get_submodule(path)
        alike = isinstance(
            kind, (TorchAttention, Experts)
        )  # they have no projections with values of their own
        problem = "" if alike else uses.problem(parent, path, projections_of(parent, kind))
        blocks.append(
            FoundBlock(
                name=name or "model",
                parent=parent,
                path=path,
                kind=kind,
                declared=declared,
                call=trace.calls.get(path),
                inside=_inside(model, trace, path, kind),
                problem=problem,
                keeps_heads=uses.keeps_heads(path),
            )
        )
    names = [block.name for block in blocks]
    return [
        block
        if names.count(block.name) == 1
        else replace(block, name=f"{block.path}.{block.kind.out}".lstrip("."))
        for block in blocks
    ]


def _inside(
    model: nn.Module, trace: Trace, path: str, kind: AnyKind
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if isinstance(kind, Units):
        return kind.inside
    last = trace.first.get(f"{path}.{kind.out}".lstrip("."))
    return () if last is None else tuple(inside_of(model, trace, last, path))


def _kinds_of(
    module: nn.Module, extra: Mapping[type[nn.Module], UnitKind | Sequence[UnitKind]]
) -> Iterator[UnitKind]:
    for known, kind in extra.items():
        if isinstance(module, known):
            for each in (kind,) if isinstance(kind, (Mlp, Attention)) else kind:
                _require(module, each)
                yield each
            return
    named = next((ATTENTIONS[c.__name__] for c in type(module).__mro__ if c.__name__ in ATTENTIONS), None)
    attention = named or next(
        (a for a in OWN_GPTS if _has(module, a) and isinstance(head_width(module, a), int)), None
    )
    if attention is not None:
        try:
            _require(module, attention)
        except TrimtabError:  # a variant (cross-attention, say): the trace tells what it is
            return
        yield attention
    if named is None:
        mlp = _sequential(module) if isinstance(module, nn.Sequential) else _named_mlp(module)
        if mlp is not None:
            yield mlp


def _named_mlp(module: nn.Module) -> Mlp | None:
    known = (TORCH_MLP,) if isinstance(module, TORCH_LAYERS) else MLPS
    return next((mlp for mlp in known if _has(module, mlp) and _is_mlp(module, mlp)), None)


def _sequential(module: nn.Sequential) -> Mlp | None:
    """An MLP of: Linear, elementwise modules, Linear, and optionally a dropout."""
    linears = [name for name, child in module.named_children() if is_linear(child)]
    others = [child for child in module if not is_linear(child)]
    if len(linears) != 2 or linears[0] != "0" or not all(isinstance(c, _ELEMENTWISE) for c in others):
        return None
    after = list(module)[int(linears[1]) + 1 :]
    mlp = Mlp(ins=(linears[0],), out=linears[1])
    return mlp if all(isinstance(c, nn.Dropout) for c in after) and _is_mlp(module, mlp) else None


def _is_mlp(module: nn.Module, mlp: Mlp) -> bool:
    projections = projections_of(module, mlp)
    width, hidden = features(projections[mlp.ins[0]])
    if any(features(projections[name]) != (width, hidden) for name in mlp.ins):
        return False
    # A norm over the hidden units would see this rank's units only; one as wide as the input applies to the input.
    others = [p for name, p in module.named_parameters() if name.rpartition(".")[0] not in projections]
    over_hidden = hidden != width and any(hidden in p.shape and p.ndim == 1 for p in others)
    return features(projections[mlp.out])[0] == hidden and not over_hidden


def projections_of(module: nn.Module, kind: AnyKind) -> dict[str, nn.Module]:
    """The linear maps of a block by name, that out of the units last."""
    if isinstance(kind, (TorchAttention, Experts)):
        names: list[str | None] = [kind.out or None]
    elif isinstance(kind, (Mlp, Units)):
        names = [*(kind.ins if isinstance(kind, Mlp) else kind.parts), kind.out]
    else:
        names = [kind.qkv, kind.query, kind.key, kind.value, kind.out]
    return {name: module.get_submodule(name) for name in names if name is not None}


def _has(module: nn.Module, kind: UnitKind) -> bool:
    try:
        return all(is_linear(projection) for projection in projections_of(module, kind).values())
    except AttributeError:
        return False


def head_width(module: nn.Module, kind: Attention) -> Any:
    """The width of a head, from an attribute of the module or of one inside it; None if there is none."""
    holder, _, name = kind.head_dim.rpartition(".")
    return getattr(module.get_submodule(holder), name, None)


def _require(module: nn.Module, kind: UnitKind) -> None:
    """Raise if a module is not of the kind it is declared as."""
    what = type(module).__name__
    if not _has(module, kind):
        raise TrimtabError(
            f"tensor_parallel: {what} does not have the linear projections of {kind}; pass its own in kinds="
        )
    if isinstance(kind, Mlp):
        if not _is_mlp(module, kind):
            raise TrimtabError(
                f"tensor_parallel: {what} is not a {kind}: its projections have different hidden widths, "
                "or a norm is applied to the hidden units"
            )
        return
    if (kind.qkv is None) == (None in (kind.query, kind.key, kind.value)):
        raise TrimtabError(f"tensor_parallel: {kind} for {what} needs qkv, or query, key and value")
    for attribute in kind.without:
        if getattr(module, attribute, False):
            raise TrimtabError(
                f"tensor_parallel: a {what} with {attribute} is not supported; "
                "replicate it with replicate=..."
            )
    dim = head_width(module, kind)
    if not isinstance(dim, int):
        raise TrimtabError(f"tensor_parallel: {what}.{kind.head_dim} is not an integer, the width of a head")
    into = {name: features(projection)[1] for name, projection in projections_of(module, kind).items()}
    heads = features(module.get_submodule(kind.out))[0]
    if kind.qkv is not None:
        fits = heads % dim == 0 and into[kind.qkv] == 3 * heads
    else:
        query, key, value = (into[name] for name in (kind.query, kind.key, kind.value) if name is not None)
        fits = query == heads and key == value and key % dim == 0 and heads % key == 0
    if not fits:
        raise TrimtabError(
            f"tensor_parallel: {what}: projections with {into} outputs and {heads} inputs of {kind.out!r} "
            f"do not form heads of width {dim}"
        )
