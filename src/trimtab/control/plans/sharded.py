"""Plans for models of `fully_shard` modules (FSDP2 and HSDP)."""

from __future__ import annotations

from glob import escape

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.codec import Block
from trimtab.control.compression.explanation import record_explanation
from trimtab.control.compression.fsdp import compress_fsdp, fsdp_compression_of, is_fsdp
from trimtab.errors import TrimtabError
from trimtab.model_state import attach_state
from trimtab.planning.plan import Plan
from trimtab.wire_format import MIN_NUMEL


def require_wrapper(model: nn.Module, plan: Plan) -> None:
    """Raise if the model is wrapped in something else than planned; a bare module may still be wrapped."""
    sharded = is_fsdp(model)
    if plan.wrapper == "ddp" and sharded:
        raise TrimtabError(
            "apply: the plan is for DDP, and this model is sharded by fully_shard; wrap it with "
            "torch.nn.parallel.DistributedDataParallel(model), which fits the memory of every rank according to the "
            "plan"
        )
    if plan.wrapper == "fsdp" and isinstance(model, DistributedDataParallel):
        raise TrimtabError(
            "apply: the plan is for FSDP2, because a whole copy does not fit every rank, and this model is wrapped in "
            f"DistributedDataParallel; wrap it with {_way(plan)} instead"
        )
    if sharded:
        _require_sharding(model, plan)
        if plan.bits == "adaptive" or plan.accumulate > 1:
            raise TrimtabError(
                "apply: bits that adapt and micro-batches are not offered with fully_shard; make the plan again with "
                "`trimtab plan --bits 4`"
            )


def _require_sharding(model: nn.Module, plan: Plan) -> None:
    """Raise if the model is sharded over other ranks than planned, or its copies are not averaged."""
    from trimtab.doors.fsdp import process_groups

    shards, copies = process_groups(model)
    ways, expected = 1 if shards is None else shards.size(), plan.shard_ranks or plan.world_size
    if ways != expected:
        raise TrimtabError(
            f"apply: the plan shards the model over {expected} ranks, and it is sharded over {ways}; wrap it with "
            f"{_way(plan)}"
        )
    together = ways * (1 if copies is None else copies.size())
    if together != plan.world_size:
        raise TrimtabError(
            f"apply: the plan is for {plan.world_size} ranks that train one model, and only {together} of them average "
            f"their gradients; wrap it with {_way(plan)}"
        )
    members = [dist.get_rank()] if shards is None else sorted(dist.get_process_group_ranks(shards))
    if members != list(range(members[0], members[0] + ways)) or members[0] % ways:
        raise TrimtabError(
            f"apply: the plan shards the model over {ways} ranks in a row, and it is sharded over ranks {members}; "
            f"wrap it with {_way(plan)}"
        )


def compress_sharded(model: nn.Module, plan: Plan, seed: int) -> str:
    """Compress gradients as the plan says, unless that is decided already; returns what happens to them."""
    state = attach_state(model)
    if state.compression_plan is not None:
        return "gradients are sent as under the previous plan"
    compression = fsdp_compression_of(model)
    if compression is not None:
        return f"gradients are sent as set by trimtab.compress ({compression.codec}), not as in the plan"
    state.compression_plan = plan
    if plan.bits is None:
        return "gradients are not compressed"
    assert plan.bits != "adaptive", "require_wrapper refuses it"
    explanation = compress_fsdp(
        model,
        Block(bits=plan.bits),
        overrides={
            escape(n): None if bits is None else Block(bits=bits) for n, bits in plan.layer_bits.items()
        },
        min_numel=MIN_NUMEL,
        error_feedback=None,
        seed=seed,
        weight_bits=plan.weight_bits,
    )
    record_explanation(model, explanation)
    weights = "" if plan.weight_bits is None else f", weights in {plan.weight_bits}"
    return f"gradients in {plan.bits} bits{weights}"


def _way(plan: Plan) -> str:
    """How the script wraps the model as planned."""
    dims = "'dp'" if plan.shard_ranks is None else "'replicate', 'shard'"
    return f"torch.distributed.fsdp.fully_shard(model, mesh=trimtab.mesh(plan)[{dims}])"
