"""Compressing the gradients and weights of a model of `fully_shard` modules (FSDP2)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from trimtab.codec import Block, Codec
from trimtab.doors.fsdp import FsdpCompression
from trimtab.errors import TrimtabError
from trimtab.model_state import attach_state, state_of


def is_fsdp(model: torch.nn.Module) -> bool:
    """Whether `fully_shard` was called on the model or its modules; raises for FSDP1."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # not imported, so it was not used; importing it takes a while
        return False
    modules = list(model.modules())
    if any(isinstance(module, fsdp.FullyShardedDataParallel) for module in modules):
        raise TrimtabError(
            "compress: the collectives of FullyShardedDataParallel (FSDP1) cannot be replaced; shard the model with "
            "torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
    return any(isinstance(module, fsdp.FSDPModule) for module in modules)


def fsdp_compression_of(model: torch.nn.Module) -> FsdpCompression | None:
    """The compression of a model of `fully_shard` modules, if there is one."""
    compression: FsdpCompression | None = state_of(model).fsdp_compression
    return compression


def compress_fsdp(
    model: torch.nn.Module,
    codec: object | None,
    *,
    overrides: Mapping[str, Codec | None] | None,
    min_numel: int,
    error_feedback: bool | None,
    seed: int,
    weight_bits: int | None,
) -> str:
    """As `trimtab.compress`, for FSDP2; returns what was decided, and why. Collective.

    Without a codec, each axis of the mesh is measured separately: with HSDP the shards are often inside a
    host and the replicas across the slow link.
    """
    from trimtab.doors.fsdp import FsdpCompression, process_groups
    from trimtab.doors.parameters import choose_bits

    if fsdp_compression_of(model) is not None:
        raise TrimtabError("compress: this model is already compressed; call it once")
    if codec is not None and not isinstance(codec, Block):
        raise TrimtabError(f"compress: {codec} is not offered with fully_shard; use Block(bits=...)")
    if error_feedback:
        raise TrimtabError(
            "compress: error feedback would hold a full copy of the model's gradients on every rank, which "
            "sharding is there to avoid; use 4 bits or more, stochastic"
        )
    if weight_bits is not None and not 1 <= weight_bits <= 8:
        raise TrimtabError(
            f"compress: weight_bits must be 1 to 8, or None for exact weights; got {weight_bits}"
        )
    sizes = {name: (p.numel(), p.dim()) for name, p in model.named_parameters(remove_duplicate=False)}
    axes = dict(zip(("shard", "replicate"), process_groups(model), strict=True))
    groups = {axis: group for axis, group in axes.items() if group is not None and group.size() > 1}
    if not groups:
        return "one rank: there is nothing to send, so nothing to compress"
    reasons = dict.fromkeys(groups, f"compressing with {codec}, as requested")
    chosen = dict.fromkeys(groups, True)
    if codec is None:
        codec = Block()
        for axis, group in groups.items():
            chosen[axis], reasons[axis] = _judge(codec, group, model)
    explanation = "; ".join(f"{axis} axis: {reason}" for axis, reason in reasons.items())
    if weight_bits is not None and "shard" in groups:
        explanation += f"; weights are gathered in {weight_bits} bits"
    elif not any(chosen.values()):
        return explanation
    compression = FsdpCompression(
        model,
        codec,
        choose_bits(sizes, codec, overrides or {}, min_numel)[0],
        weight_bits=weight_bits,
        seed=seed,
        shard=chosen.get("shard", False),
        replicate=chosen.get("replicate", False),
    )
    attach_state(model).fsdp_compression = compression
    kept = sum(numel for numel, bits, _ in compression.pieces.values() if bits == 0)
    share = kept / sum(numel for numel, _, _ in compression.pieces.values())
    return f"{explanation}; small or excluded parameters ({share:.1%} of the values) are sent exactly"


def _judge(codec: Block, group: dist.ProcessGroup, model: torch.nn.Module) -> tuple[bool, str]:
    from trimtab.measure.exchange import measure_exchange
    from trimtab.planning.compression.payoff import decide

    parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in parameters)
    exchange = measure_exchange(codec, (group, group), parameters[0].to_local().device, numel)
    decision = decide(exchange, sum(p.numel() * p.element_size() for p in parameters))
    return decision.compress, decision.reason
