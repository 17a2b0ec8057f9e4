"""Precisions by name pattern, matched against a workload as `trimtab.set_precision` matches the model."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from trimtab.errors import TrimtabError
from trimtab.precision_names import ATTENTION, EVERYTHING, OPERATOR_PRECISIONS, Precision, lowers_products
from trimtab.workload import Workload


def settable(kind: str) -> tuple[str, ...]:
    """The precisions that a kind of operator can have on at least one device."""
    return OPERATOR_PRECISIONS["attention" if kind == "matmul" else kind]  # type: ignore[index]


def matched(workload: Workload, patterns: Mapping[str, Precision | str]) -> dict[str, str]:
    """The precision of every operator that a pattern sets, by the operator's name.

    The first matching pattern wins. A pattern with a wildcard skips operators that cannot have its precision.

    Raises:
        TrimtabError: a precision does not exist, or a pattern matches nothing.
    """
    parsed = {pattern: _precision(pattern, value) for pattern, value in patterns.items()}
    names_only = not any(special in pattern for pattern in parsed for special in "*?[")
    precisions: dict[str, str] = {}
    unused = set(patterns)
    for name, indices in workload.settings.items():
        offered = settable(workload.operators[indices[0]].kind)
        for candidate in _candidates(name):
            if names_only and candidate not in parsed:
                continue
            for pattern, precision in ({candidate: parsed[candidate]} if names_only else parsed).items():
                if not (fnmatchcase(candidate, pattern) or pattern in EVERYTHING):
                    continue
                if name.endswith(ATTENTION) != pattern.endswith(ATTENTION):
                    continue
                unused.discard(pattern)
                if candidate != pattern and not set(precision.names) <= set(offered):
                    continue
                precisions.setdefault(name, str(precision))
                break
    if unused:
        some = ", ".join(list(workload.settings)[:8]) or "none"
        raise TrimtabError(
            f"{', '.join(map(repr, sorted(unused)))} matches no operator of {workload.model}, or only ones that an "
            f"earlier pattern sets; its operators are {some}{', ...' if len(workload.settings) > 8 else ''}"
        )
    return precisions


def with_products(workload: Workload, patterns: Mapping[str, Precision | str]) -> dict[str, str]:
    """As `matched`, and in bf16 the products of activations that a pattern for everything lowers with the operators.

    For memory: a profile need not have times of products in bf16.
    """
    precisions = matched(workload, patterns)
    if lowers_products(patterns):
        for name in workload.settings:
            if name.endswith(ATTENTION) and not _is_layer(workload, name):
                precisions.setdefault(name, "bf16")
    return precisions


def _is_layer(workload: Workload, name: str) -> bool:
    """Whether products are those of a layer with a forward of its own, which keeps its precision: by its weight."""
    weight = name.removesuffix(ATTENTION) + ".weight"
    return all(weight in workload.operators[index].parameters for index in workload.settings[name])


def _candidates(name: str) -> list[str]:
    """The names that can set an operator: attention also by any enclosing module, outermost first."""
    if not name.endswith(ATTENTION):
        return [name]
    parts = name.removesuffix(ATTENTION).split(".")
    return [".".join(parts[: i + 1]) + ATTENTION for i in range(len(parts))]


def _precision(pattern: str, value: Precision | str) -> Precision:
    try:
        return Precision.of(value)
    except ValueError as error:
        raise TrimtabError(f"{pattern!r}: {error}") from error
