"""`trimtab.set_precision`: operators of a model in lower precision, in place and reversibly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

from trimtab import environment
from trimtab.precision.setting import set_operators
from trimtab.precision_names import Precision

Model = TypeVar("Model", bound=nn.Module)


def set_precision(model: Model, precisions: Mapping[str, Precision | str], *, seed: int = 0) -> Model:
    """Compute operators of a model in lower precision; in place, and returns the model.

    Parameters, their names, dtypes and gradients, `state_dict`, hooks, classes and the model's outputs stay the same;
    inside a model in fp32, operators hand on bf16 where that is safe, as under autocast. A second
    call replaces what the first one set, and ``set_precision(model, {})`` restores the model exactly.
    Call it before `torch.compile`; before or after DDP and FSDP2.

    Args:
        precisions: by pattern of operator names; the first match applies: ``{"*.mlp.*": "int8", "*": "bf16"}``.
            Values are ``"fp32"``, ``"tf32"``, ``"bf16"``, ``"fp16"``, ``"fp8"``, ``"int8"`` or a
            `Precision`. Operators are linear layers (also transformers' ``Conv1D``), 1-D and 2-D
            convolutions and embeddings, under their module's name; a module's name with ``/attention``
            stands for the products of activations in its forward. Embeddings and attention support half types
            only; a pattern with a wildcard skips operators that do not support its precision. The pattern ``*``
            also leaves operators alone that would be slower in 8 bits, by their shape (`trimtab.explain` says which);
            ``?*`` lowers them all.
        seed: seed of the stochastic rounding. Each rank has a random stream of its own.

    Raises:
        TrimtabError: a pattern matches nothing, ``*`` would lower nothing that pays, or the device does not support
            a precision.
    """
    if not environment.disabled():
        set_operators(model, precisions, seed=seed)
    return model
