"""`trimtab.set_precision`: operators of a model in lower precision, in place and reversibly."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab import environment
from trimtab.codec.packing import name_hash
from trimtab.errors import TrimtabError
from trimtab.precision import Precision
from trimtab.precision.devices import EVER, offers, refuse_unsupported
from trimtab.precision.draw import base_key
from trimtab.precision.operators import ATTENTION, Calls, Kind, LowForward, install, operators, restore

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeVar

    Model = TypeVar("Model", bound=nn.Module)


def set_precision(model: Model, precisions: Mapping[str, Precision | str], *, seed: int = 0) -> Model:
    """Compute operators of a model in lower precision; in place, and returns the model.

    Parameters, their names, types and gradients, `state_dict`, hooks and classes stay what they are. A
    second call replaces what the first one set, and ``set_precision(model, {})`` restores the model exactly.
    Call it before `torch.compile`; before or after DDP and FSDP2.

    Args:
        precisions: by pattern of operator names, first match first: ``{"*.mlp.*": "int8", "*": "bf16"}``.
            Values are ``"fp32"``, ``"tf32"``, ``"bf16"``, ``"fp16"``, ``"fp8"``, ``"int8"`` or a
            `Precision`. Operators are linear layers (also transformers' ``Conv1D``), 1-D and 2-D
            convolutions and embeddings, under their module's name; a module's name with ``/attention``
            stands for the products of activations in its forward. An embedding takes half types only, and
            a pattern with a wildcard passes over it where another is asked for.
        seed: of the stochastic rounding. Ranks have streams of their own.

    Raises:
        TrimtabError: a pattern that matches nothing, or a precision the device does not offer.
    """
    if environment.disabled():
        return model
    root = _unwrapped(model)
    chosen = _matched(root, {pattern: _precision(pattern, value) for pattern, value in precisions.items()})
    device = _device(root)
    for name, (kind, precision) in chosen.items():
        refuse_unsupported(name, kind, precision, device)
    restore(root)
    if not chosen:
        return model
    calls = Calls(torch.zeros(1, dtype=torch.int64, device=device))
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    for name, (kind, precision) in chosen.items():
        module = root.get_submodule(name.removesuffix(ATTENTION))
        install(module, kind, precision, base_key(seed, rank, name_hash(name)), calls)
    root.register_forward_pre_hook(calls)
    return model


def precisions_of(model: nn.Module) -> dict[str, Precision]:
    """What `set_precision` has set, by operator name."""
    found = {}
    for name, module in _unwrapped(model).named_modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, LowForward):
            found[name] = forward.precision
    return found


def _precision(pattern: str, value: Precision | str) -> Precision:
    try:
        return Precision.of(value)
    except ValueError as error:
        raise TrimtabError(f"set_precision: {pattern!r}: {error}") from error


def _matched(root: nn.Module, patterns: Mapping[str, Precision]) -> dict[str, tuple[Kind, Precision]]:
    """Every operator that a pattern sets, with the first one that matches."""
    known: dict[str, Kind] = dict(operators(root))
    if any(pattern.endswith(ATTENTION) for pattern in patterns):
        known |= {
            name + ATTENTION: "attention"
            for name, module in root.named_modules()
            if name and name not in known and not isinstance(module, nn.MultiheadAttention)
        }
    chosen: dict[str, tuple[Kind, Precision]] = {}
    unused = set(patterns)
    for name, kind in known.items():
        for pattern, precision in patterns.items():
            if not fnmatchcase(name, pattern) or (kind == "attention") != pattern.endswith(ATTENTION):
                continue
            unused.discard(pattern)
            if name != pattern and not set(precision.names) <= set(EVER[kind]):
                continue  # a wildcard passes over what no device could give
            chosen[name] = (kind, precision)
            break
    whole = [
        name
        for name, module in root.named_modules()
        if isinstance(module, nn.MultiheadAttention) and name + ATTENTION in unused
    ]
    if whole:
        raise TrimtabError(
            f"set_precision: {whole[0]} is torch's own MultiheadAttention, which computes its products in one call "
            f"that cannot be divided; leave out {whole[0] + ATTENTION!r}, or call scaled_dot_product_attention in a "
            "module of your own"
        )
    if unused:
        some = ", ".join(list(known)[:8]) or "none"
        raise TrimtabError(
            f"set_precision: {', '.join(map(repr, sorted(unused)))} matches no operator of this model, or only "
            f"ones that an earlier pattern sets; its operators are {some}{', ...' if len(known) > 8 else ''}"
        )
    return chosen


def _unwrapped(model: nn.Module) -> nn.Module:
    if hasattr(model, "_orig_mod"):
        raise TrimtabError(
            "set_precision: this model is compiled already; set its precision first, then torch.compile it"
        )
    return model.module if isinstance(model, DistributedDataParallel) else model


def _device(root: nn.Module) -> torch.device:
    for tensor in root.parameters():
        if tensor.device.type != "meta":
            return tensor.device
    return torch.accelerator.current_accelerator() or torch.device("cpu")


__all__ = ["offers", "precisions_of", "set_precision"]
