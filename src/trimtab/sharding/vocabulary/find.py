"""Find the embedding and the output head of a model that are divided by vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from trimtab.errors import TrimtabError

NAME = "vocabulary"
"""Name of the block."""


@dataclass(frozen=True, kw_only=True)
class FoundVocabulary:
    """The modules of a vocabulary: each appears in the model under one name or several."""

    entries: int
    embeddings: dict[nn.Embedding, list[str]]
    heads: dict[nn.Linear, list[str]]

    @property
    def modules(self) -> Mapping[nn.Module, list[str]]:
        every: list[tuple[nn.Module, list[str]]] = [*self.embeddings.items(), *self.heads.items()]
        return dict(every)


def find_vocabulary(model: nn.Module, names: bool | tuple[str, ...]) -> FoundVocabulary | None:
    """The embeddings and heads of these names, and all that share a matrix with one of them; None for False.

    Args:
        names: True for what transformers declares, or for an `nn.Linear` with as many outputs as an `nn.Embedding` has
            entries.
    """
    if names is False:
        return None
    paths: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(name)
    chosen = _declared(model, paths) if names is True else [_named(model, name) for name in names]
    chosen = chosen or _alike(paths)
    if not chosen:
        raise TrimtabError(
            f"tensor_parallel: no vocabulary in this {type(model).__name__}; name its embedding and head: "
            'vocabulary=("embedding", "head")'
        )
    shared = {id(p) for module in chosen for p in module.parameters(recurse=False)}
    modules = [m for m in paths if any(id(p) in shared for p in m.parameters(recurse=False))]
    embeddings = {m: paths[m] for m in modules if isinstance(m, nn.Embedding)}
    heads = {m: paths[m] for m in modules if isinstance(m, nn.Linear)}
    _check(paths, embeddings, heads, modules)
    entries = {m.num_embeddings for m in embeddings} | {m.out_features for m in heads}
    if len(entries) != 1:
        named = ", ".join(paths[m][0] for m in [*embeddings, *heads])
        raise TrimtabError(
            f"tensor_parallel: {named} have vocabularies of different sizes: {sorted(entries)}; name the modules of one"
        )
    return FoundVocabulary(entries=entries.pop(), embeddings=embeddings, heads=heads)


def _declared(model: nn.Module, paths: Mapping[nn.Module, list[str]]) -> list[nn.Module]:
    """What a model of transformers says itself."""
    modules: list[nn.Module] = []
    for method in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(model, method)()
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(module, (nn.Embedding, nn.Linear)) and module in paths:
            modules.append(module)
    return modules


def _named(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise TrimtabError(
            f"tensor_parallel: vocabulary names {name!r}, and the model has no such module"
        ) from None


def _alike(paths: Mapping[nn.Module, list[str]]) -> list[nn.Module]:
    """The largest embedding that a linear map has as many outputs for, and those maps."""
    embeddings = [m for m in paths if isinstance(m, nn.Embedding)]
    for embedding in sorted(embeddings, key=lambda m: -m.num_embeddings):
        heads = [m for m in paths if isinstance(m, nn.Linear) and m.out_features == embedding.num_embeddings]
        if heads:
            return [embedding, heads[-1]]
    return []


def _check(
    paths: Mapping[nn.Module, list[str]],
    embeddings: Mapping[nn.Embedding, list[str]],
    heads: Mapping[nn.Linear, list[str]],
    modules: list[nn.Module],
) -> None:
    """Raise if a module does something else than look up or score single entries."""
    weights = {id(m.weight) for m in [*embeddings, *heads]}
    for module in modules:
        known = type(module) in (nn.Embedding, nn.Linear)
        holds_matrix = any(id(p) in weights for p in module.parameters(recurse=False))
        unusual = isinstance(module, nn.Embedding) and (
            module.max_norm is not None or module.scale_grad_by_freq or module.sparse
        )
        if (holds_matrix and not known) or unusual:
            raise TrimtabError(
                f"tensor_parallel: {paths[module][0]} ({type(module).__name__}) cannot be divided by vocabulary: only "
                "a plain nn.Embedding (without max_norm, scale_grad_by_freq, sparse) and nn.Linear can; convert the "
                "model without vocabulary"
            )
