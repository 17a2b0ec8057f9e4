"""Set the precision of a model's operators by name pattern, and restore them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.environment import logger
from trimtab.errors import TrimtabError
from trimtab.model_state import attach_state, state_of
from trimtab.precision.devices import offers, refuse_unsupported
from trimtab.precision.draw import base_key
from trimtab.precision.operators import (
    LowPrecisionForward,
    install,
    is_projection,
    operators,
    refusals,
    restore,
    unlowered,
)
from trimtab.precision.results import CallCounter, hand_on_low_results
from trimtab.precision.worth import passed_over
from trimtab.precision_names import (
    ATTENTION,
    EVERYTHING,
    LOW,
    OPERATOR_PRECISIONS,
    OperatorKind,
    Precision,
    PrecisionName,
    lowers_products,
)
from trimtab.random_bits import name_hash


def set_operators(model: nn.Module, precisions: Mapping[str, Precision | str], *, seed: int = 0) -> None:
    """Replace the precisions of a model's operators; see `trimtab.set_precision`. Without patterns: restore them.

    Raises:
        TrimtabError: as `trimtab.set_precision`. The model has not been changed then.
    """
    if not isinstance(model, nn.Module):
        raise TrimtabError(f"set_precision: expected an nn.Module, got {type(model).__name__}")
    if not isinstance(precisions, Mapping):
        raise TrimtabError(
            f"set_precision: expected precisions by pattern of operator names, got {precisions!r}; for the same "
            "precision everywhere pass {'*': 'bf16'}, and {} to restore the model"
        )
    root = _unwrapped(model)
    device = _device(root)
    left_alone: dict[str, str] = {}

    def passes_over(name: str, kind: OperatorKind, precision: Precision) -> bool:
        reason = passed_over(root.get_submodule(name), kind, precision, device)
        if reason is not None:
            left_alone[name] = reason
        return reason is not None

    chosen = match(root, precisions, offers(device), passes_over)
    for name, (kind, precision) in chosen.items():
        refuse_unsupported(name, kind, precision, device)
    if left_alone and not chosen:
        name, reason = next(iter(left_alone.items()))
        raise TrimtabError(
            f"set_precision: '*' lowers nothing in this model: {name}: {reason} (as of {len(left_alone)} operators). "
            "Name operators to lower them anyway, for their memory say; '?*' matches all"
        )
    restore(root)
    left_alone = {name: reason for name, reason in left_alone.items() if name not in chosen}
    if left_alone or state_of(root).left_alone:
        attach_state(root).left_alone = left_alone or None
    if not chosen:
        return
    calls = CallCounter(torch.zeros(1, dtype=torch.int64, device=device))
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    # Ranks of a tensor group hold what is not divided in copies, which must round alike to stay alike.
    copies = (getattr(module, "copy") for module in root.modules() if is_projection(module))  # noqa: B009
    copy: int = next(copies, rank)
    lowered: set[nn.Module] = set()
    for name, (kind, precision) in chosen.items():
        module = root.get_submodule(name.removesuffix(ATTENTION))
        rounds_as = rank if is_projection(module) else copy
        install(module, kind, precision, base_key(seed, rounds_as, name_hash(name)), calls)
        if precision.forward in LOW and kind != "embedding" and not is_projection(module):
            lowered.add(module)
    root.register_forward_pre_hook(calls)
    if lowered:
        products = "bf16" in offers(device)["attention"] and lowers_products(precisions)
        hand_on_low_results(root, calls, lowered, unlowered(root) if products else None)


def precisions_of(model: nn.Module) -> dict[str, Precision]:
    """The precisions that are set, by module name."""
    return {
        name: forward.precision
        for name, module in _unwrapped(model).named_modules()
        if isinstance(forward := module.__dict__.get("forward"), LowPrecisionForward)
    }


def match(
    root: nn.Module,
    precisions: Mapping[str, Precision | str],
    offered: Mapping[OperatorKind, tuple[PrecisionName, ...]] = OPERATOR_PRECISIONS,
    passes_over: Callable[[str, OperatorKind, Precision], bool] = lambda *_: False,
) -> dict[str, tuple[OperatorKind, Precision]]:
    """Every operator that a pattern matches, with the precision of the first such pattern.

    Args:
        offered: what the device offers, by kind of operator.
        passes_over: whether the pattern ``*`` leaves an operator alone.
    """
    somewhere = {name for names in offered.values() for name in names}
    patterns = {pattern: _precision(pattern, value) for pattern, value in precisions.items()}
    known: dict[str, OperatorKind] = dict(operators(root))
    if any(pattern.endswith(ATTENTION) for pattern in patterns):
        known |= {
            name + ATTENTION: "attention"
            for name, module in root.named_modules()
            if name and name not in known and not isinstance(module, nn.MultiheadAttention)
        }
    chosen: dict[str, tuple[OperatorKind, Precision]] = {}
    unused = set(patterns)
    for name, kind in known.items():
        for pattern, precision in patterns.items():
            # A model that is a single operator has no name, which "?*" does not match literally.
            if not (fnmatchcase(name, pattern) or pattern in EVERYTHING):
                continue
            if (kind == "attention") != pattern.endswith(ATTENTION):
                continue
            unused.discard(pattern)
            # A wildcard skips operators that cannot have its precision: on any device, or on this one, if it
            # offers it for others.
            wanted = set(precision.names)
            possible = offered[kind] if wanted <= somewhere else OPERATOR_PRECISIONS[kind]
            if name != pattern and not wanted <= set(possible):
                continue
            if pattern == "*" and passes_over(name, kind, precision):
                continue
            chosen[name] = (kind, precision)
            break
    refused = refusals(root)
    for pattern in patterns:
        names = [name for name in refused if fnmatchcase(name, pattern)]
        if names and pattern in unused:
            raise TrimtabError(f"set_precision: {refused[names[0]]}; leave out {pattern!r}")
        for name in names:
            logger().info("set_precision: %s; it keeps its precision", refused[name])
    if unused:
        examples = ", ".join(list(known)[:8]) or "none"
        raise TrimtabError(
            f"set_precision: {', '.join(map(repr, sorted(unused)))} matches no operator of this model, or only "
            f"operators that an earlier pattern sets; its operators are {examples}{', ...' if len(known) > 8 else ''}"
        )
    return chosen


def _precision(pattern: str, value: Precision | str) -> Precision:
    try:
        return Precision.of(value)
    except ValueError as error:
        raise TrimtabError(f"set_precision: {pattern!r}: {error}") from error


def _unwrapped(model: nn.Module) -> nn.Module:
    if hasattr(model, "_orig_mod"):
        raise TrimtabError(
            "set_precision: this model is already compiled; set its precision first, then call torch.compile"
        )
    return model.module if isinstance(model, DistributedDataParallel) else model


def _device(root: nn.Module) -> torch.device:
    for tensor in root.parameters():
        if tensor.device.type != "meta":
            return tensor.device
    return torch.accelerator.current_accelerator() or torch.device("cpu")
