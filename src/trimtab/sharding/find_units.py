"""Find the blocks of units in a model; modules of unknown kind raise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from trimtab.errors import TrimtabError
from trimtab.sharding.unit_kinds import ATTENTIONS, MLPS, OWN_GPTS, Attention, Mlp, UnitKind

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
    kind: UnitKind
    declared: bool
    """Whether the user declared the kind: then nobody has checked that the module works with some of its units."""


def find_blocks(
    model: nn.Module, extra: Mapping[type[nn.Module], UnitKind | Sequence[UnitKind]], replicate: Sequence[str]
) -> list[FoundBlock]:
    """Every block of units in a model; raises if part of a repeated layer is of unknown kind."""
    blocks: list[FoundBlock] = []
    covered: set[nn.Module] = set()
    for path, module in model.named_modules():
        if any(fnmatchcase(path, pattern) for pattern in replicate):
            covered.update(module.modules())
        if module in covered:
            continue
        kinds = list(_kinds_of(module, extra))
        for kind in kinds:
            name = path if len(kinds) == 1 else f"{path}.{type(kind).__name__.lower()}"
            # Names that others may use as well say little.
            declared = isinstance(module, tuple(extra)) or kind is OWN_GPTS[1]
            blocks.append(
                FoundBlock(name=name or "model", parent=module, path=path, kind=kind, declared=declared)
            )
            covered.update(projections_of(module, kind).values())
    _refuse_unknown(model, covered, bool(blocks))
    return blocks


def is_linear(module: object) -> bool:
    """Whether it is an `nn.Linear`, or a `Conv1D` of transformers, whose weight is transposed."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight's first axis is the input."""
    return not isinstance(module, nn.Linear)


def features(module: nn.Module) -> tuple[int, int]:
    """Number of inputs and of outputs."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    rows, columns = weight.shape
    return (rows, columns) if is_transposed(module) else (columns, rows)


def attention_dropout(module: nn.Module, kind: Attention) -> float:
    """The current dropout probability of the module's attention weights."""
    value = getattr(module, kind.dropout, 0.0) if kind.dropout else 0.0
    return float(getattr(value, "p", value))


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
        (a for a in OWN_GPTS if _has(module, a) and isinstance(getattr(module, a.head_dim, None), int)), None
    )
    if attention is not None:
        _require(module, attention)
        yield attention
    if named is None:
        mlp = _sequential(module) if isinstance(module, nn.Sequential) else _named_mlp(module)
        if mlp is not None:
            yield mlp


def _named_mlp(module: nn.Module) -> Mlp | None:
    return next((mlp for mlp in MLPS if _has(module, mlp) and _is_mlp(module, mlp)), None)


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
    others = [p for name, p in module.named_parameters() if name.split(".")[0] not in projections]
    over_hidden = hidden != width and any(hidden in p.shape and p.ndim == 1 for p in others)
    return features(projections[mlp.out])[0] == hidden and not over_hidden


def projections_of(module: nn.Module, kind: UnitKind) -> dict[str, nn.Module]:
    if isinstance(kind, Mlp):
        names: list[str | None] = [*kind.ins, kind.out]
    else:
        names = [kind.qkv, kind.query, kind.key, kind.value, kind.out]
    return {name: module.get_submodule(name) for name in names if name is not None}


def _has(module: nn.Module, kind: UnitKind) -> bool:
    try:
        return all(is_linear(projection) for projection in projections_of(module, kind).values())
    except AttributeError:
        return False


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
    dim = getattr(module, kind.head_dim, None)
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


def _refuse_unknown(model: nn.Module, covered: set[nn.Module], any_block: bool) -> None:
    """Outside the repeated layers everything is replicated; inside, only norms, embeddings and buffers."""
    unknown: dict[str, str] = {}
    for path, container in model.named_modules():
        if container in covered or not _repeats(container):
            continue
        for name, module in container.named_modules(prefix=path):
            own = list(module.parameters(recurse=False))
            if own and module not in covered and not _replicable(module):
                parent = model.get_submodule(name.rpartition(".")[0])
                owner, at = (parent, name.rpartition(".")[0]) if is_linear(module) else (module, name)
                unknown.setdefault(type(owner).__name__, at)
    if unknown:
        named = ", ".join(f"{kind} ({at})" for kind, at in unknown.items())
        raise TrimtabError(
            f"tensor_parallel: modules of unknown type: {named}; declare their units with "
            "kinds={Type: Mlp(...) or Attention(...)}, or replicate them with replicate=['PATTERN']"
        )
    if not any_block:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise TrimtabError(
            f"tensor_parallel: no MLP or attention of a known kind in this {type(model).__name__}, "
            f"which consists of {', '.join(kinds)}; declare their units with kinds=..."
        )


def _repeats(container: nn.Module) -> bool:
    """Whether this is a list of repeated layers."""
    if isinstance(container, nn.ModuleList):
        return True
    kinds = (
        [type(child) for child in container if list(child.children())]
        if isinstance(container, nn.Sequential)
        else []
    )
    return len(set(kinds)) < len(kinds)


def _replicable(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.LayerNorm, nn.GroupNorm)) or type(module).__name__.endswith(
        "Norm"
    )
