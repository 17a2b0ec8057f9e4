"""`trimtab.state_dict` and `trimtab.load_state_dict`: checkpoints that resume with the same bits and plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trimtab import environment
from trimtab.control.compression.ddp import adaptive_of, compression_of
from trimtab.control.compression.fsdp import fsdp_compression_of
from trimtab.control.plans.applying import load_plan_state, plan_state


def state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """The state that trimtab needs to resume with the same bits and plan; save it in the checkpoint.

    Random streams are keyed by rank: with error feedback save and load it on every rank, otherwise
    that of rank 0 is enough.
    """
    compression, controller = fsdp_compression_of(model) or compression_of(model), adaptive_of(model)
    state = {
        "compression": compression and compression.state_dict(),
        "adaptive": controller and controller.state_dict(),
        "plan": plan_state(model),
    }
    return {key: value for key, value in state.items() if value is not None}


def load_state_dict(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Resume from `state_dict`; a module that is not compressed ignores the state of the compression.

    Every rank calls it. A plan in the state is applied, unless it is for another number of ranks.
    """
    if "plan" in state and not environment.disabled():
        load_plan_state(model, state["plan"])
    compression, controller = fsdp_compression_of(model) or compression_of(model), adaptive_of(model)
    if controller is not None and "adaptive" in state:
        controller.load_state_dict(state["adaptive"])
    if compression is not None and "compression" in state:
        compression.load_state_dict(state["compression"])
