"""The fingerprint by which a plan identifies a model."""

from __future__ import annotations

import json
from hashlib import sha256

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.model_state import state_of
from trimtab.precision.operators import operators


def fingerprint(model: nn.Module) -> str:
    """A short hash of a model's structure: names, shapes and types of its parameters, names and kinds of its
    operators. Values, devices, DDP, `torch.compile`, frozen parameters, precisions and tensor parallelism do not
    affect it, so a model on the meta device has the same fingerprint as the trained one.
    """
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        inner = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
        model = inner  # type: ignore[assignment]
    sharded = state_of(model).whole_fingerprint
    if sharded is not None:
        return sharded
    parameters = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    text = json.dumps([parameters, sorted(operators(model).items())])
    return sha256(text.encode()).hexdigest()[:16]
