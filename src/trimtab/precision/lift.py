"""bf16 results lifted to fp32, wherever they are in what a model returns."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.utils._pytree import tree_leaves, tree_map


def lifted(value: Any) -> Any:
    """The value with its bf16 tensors in fp32: those of containers, of dataclasses, mappings and distributions.

    Objects of other classes are left as they are: they may be kept from one call to the next, as caches are.
    """
    return _lifted(value, ())


def _lifted(value: Any, inside: tuple[int, ...]) -> Any:
    return tree_map(lambda leaf: _lifted_leaf(leaf, inside), value)


def _lifted_leaf(value: Any, inside: tuple[int, ...]) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype == torch.bfloat16 else value
    if value is None or id(value) in inside:
        return value
    parts = _parts(value)
    if not parts:
        return value
    inside = (*inside, id(value))
    changed = {}
    for name, part in parts.items():
        new = _lifted(part, inside)
        if any(a is not b for a, b in zip(tree_leaves(part), tree_leaves(new), strict=True)):
            changed[name] = new
    if not changed:
        return value
    result = copy.copy(value)
    for name, new in changed.items():
        if isinstance(value, MutableMapping):
            result[name] = new
        else:
            object.__setattr__(result, name, new)  # a dataclass may be frozen
    return result


def _parts(value: Any) -> dict[Any, Any]:
    """What an object that torch does not know as a container consists of."""
    if isinstance(value, MutableMapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)
        }
    return dict(vars(value)) if isinstance(value, Distribution) else {}
