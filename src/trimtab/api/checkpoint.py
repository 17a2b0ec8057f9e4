"""`trimtab.state_dict` and `trimtab.load_state_dict`: checkpoints that resume with the same bits and plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from trimtab import environment
from trimtab.control.compression.ddp import adaptive_of, compresses, compression_of
from trimtab.control.compression.fsdp import fsdp_compression_of
from trimtab.control.plans.applying import load_plan_state, plan_state
from trimtab.control.running_local_steps import local_steps_of
from trimtab.errors import TrimtabError
from trimtab.model_state import attach_state, state_of


def state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """The state that trimtab needs to resume with the same bits and plan; save it in the checkpoint.

    That of rank 0 is enough, unless error feedback is to continue too: each rank has its own, so then save and load
    it on every rank.
    """
    compression, controller = _compression(model), adaptive_of(model)
    state = {
        "compression": compression and compression.state_dict(),
        "adaptive": controller and controller.state_dict(),
        "plan": plan_state(model),
        "local_steps": None if (steps := local_steps_of(model)) is None else steps.state_dict(),
    }
    own = {key: value for key, value in state.items() if value is not None}
    return {**(state_of(model).unused_state or {}), **own}


def load_state_dict(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Resume from `state_dict`, on the same or another number of ranks. Every rank calls it.

    Bits and random streams continue; a plan for other ranks is made anew for these. Error feedback continues on a rank
    that loads what the same rank saved, and starts at zero elsewhere. A module that is not compressed keeps the state
    of the compression for the next checkpoint. Rank 0 logs what continues and what is dropped.

    Raises:
        TrimtabError: the state is of another model or version, or damaged; do not train on after it.
    """
    if not isinstance(state, Mapping):
        raise TrimtabError(f"load_state_dict: {type(state).__name__} is not a state of trimtab.state_dict")
    try:
        _load(model, state)
    except TrimtabError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TrimtabError(
            f"load_state_dict: the state is damaged, or not from trimtab.state_dict: {type(error).__name__}: {error}; "
            "resume from an older checkpoint"
        ) from error


def _load(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    outcomes = []
    if "plan" in state and not environment.disabled():
        outcomes.append(load_plan_state(model, state["plan"]))
    compression, controller = _compression(model), adaptive_of(model)
    if controller is not None and "adaptive" in state:
        controller.load_state_dict(state["adaptive"])
    if "compression" in state:
        if compression is None:
            attach_state(model).unused_state = {
                key: state[key] for key in ("compression", "adaptive") if key in state
            }
        else:
            compression.load_state_dict(state["compression"])
        outcomes.append(_outcome(state["compression"], compression))
    elif compression is not None:
        outcomes.append("bits start anew: gradients were not compressed when the checkpoint was made")
    if "local_steps" in state:
        steps = local_steps_of(model)
        if steps is None or not steps.load_state_dict(state["local_steps"]):
            outcomes.append(
                "the state of local steps is dropped: this model takes none (trimtab.local_steps)"
            )
        else:
            outcomes.append("workers continue from their last agreement")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if rank == 0 and outcomes and not environment.disabled():
        before = state.get("compression", {}).get("world_size", world_size)
        saved = "" if before == world_size else f", from a checkpoint of {before}"
        restart = f" ({os.environ[environment.RESTART]})" if environment.RESTART in os.environ else ""
        logger = environment.logger()
        logger.info("resumed on %d ranks%s%s", world_size, saved, restart)
        for outcome in "; ".join(outcomes).split("; "):
            logger.info("resumed: %s", outcome)


def _compression(model: torch.nn.Module) -> Any:
    """What encodes the gradients, if anything does: exact sums have no state."""
    return fsdp_compression_of(model) or (compression_of(model) if compresses(model) else None)


def _outcome(saved: Mapping[str, Any], compression: Any) -> str:
    """What becomes of a compression's state on these ranks, in words."""
    if compression is None:
        return "gradients are not compressed here; their bits are kept for the next checkpoint"
    text = "bits and random streams continue"
    rank, before = saved.get("rank"), saved.get("world_size", 1)
    if not saved.get("residuals"):
        return text
    if not compression.carries_error:
        return f"{text}; error feedback is dropped: it is not used any more"
    now = dist.get_world_size()
    if rank not in (None, dist.get_rank()):
        return f"{text}; error feedback is dropped: the state is rank {rank}'s"
    text += "; error feedback continues on ranks that load their own state, and starts at zero on others"
    lost = f"rank {now}" if before == now + 1 else f"ranks {now} to {before - 1}"
    return text if now >= before else f"{text}; that of {lost} is dropped"
