"""Compressing the gradients and weights of a model of `fully_shard` modules (FSDP2)."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from trimtab.codec import Block, Codec, Uncompressed
from trimtab.collectives import Hierarchy
from trimtab.collectives.hierarchy import one_host
from trimtab.control.compression.adaptive import Adaptive, Controller, family_codec
from trimtab.control.rank_values import gather_choices
from trimtab.doors.fsdp import FsdpCompression, local_device
from trimtab.errors import TrimtabError
from trimtab.model_state import attach_state, state_of
from trimtab.planning.compression.bit_planner import PlannerSettings
from trimtab.planning.compression.family import ADAMW, BITS, FAMILIES, passed_families
from trimtab.wire_format import WEIGHT_BITS

if TYPE_CHECKING:
    from trimtab.planning.compression.payoff import Decision


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


def spans_all_ranks(model: torch.nn.Module) -> bool:
    """Whether the ranks that share a copy of the model, times its copies, are all ranks of the job."""
    from trimtab.doors.fsdp import process_groups

    sizes = [group.size() for group in process_groups(model) if group is not None]
    return prod(sizes) == dist.get_world_size()


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
    weight_bits: int | Literal["auto"] | None,
    route: str | None = None,
) -> str:
    """As `trimtab.compress`, for FSDP2; returns what was decided, and why. Collective.

    Without a codec, each axis of the mesh is measured separately: with HSDP the shards are often inside a
    host and the replicas across the slow link. An axis inside a host is exact, through shared memory (Gloo). Weights
    are gathered in fewer bits, unless said otherwise, where gradients are sent so and measured gathers gain as well.
    """
    from trimtab.doors.fsdp import process_groups
    from trimtab.doors.parameters import choose_bits

    if fsdp_compression_of(model) is not None:
        raise TrimtabError("compress: this model is already compressed; call it once")
    if codec is not None and not isinstance(codec, Adaptive | Block):
        raise TrimtabError(
            f"compress: {codec} is not offered with fully_shard; use Block(bits=...) or trimtab.Adaptive()"
        )
    if route is not None:
        raise TrimtabError(
            f"compress: route={route!r} is for DDP; FSDP2's collectives follow its mesh (HSDP has two levels)"
        )
    if error_feedback and not isinstance(codec, Block):
        raise TrimtabError(
            "compress: with fully_shard, error_feedback=True needs a codec such as Block(bits=2)"
        )
    if not (weight_bits in (None, "auto") or (isinstance(weight_bits, int) and 1 <= weight_bits <= 8)):
        raise TrimtabError(
            f"compress: weight_bits must be 1 to 8, None for exact weights, or 'auto'; got {weight_bits!r}"
        )
    sizes = {name: (p.numel(), p.dim()) for name, p in model.named_parameters(remove_duplicate=False)}
    axes = dict(zip(("shard", "replicate"), process_groups(model), strict=True))
    groups = {axis: group for axis, group in axes.items() if group is not None and group.size() > 1}
    if not groups:
        return "one rank: there is nothing to send, so nothing to compress"
    reasons = dict.fromkeys(groups, f"compressing with {codec}, as requested")
    chosen = dict.fromkeys(groups, True)
    hosts: dict[str, Hierarchy] = {}
    settings: dict[str, PlannerSettings] = {}
    config = codec if isinstance(codec, Adaptive) else Adaptive()
    for axis, group in groups.items() if not isinstance(codec, Block) else ():
        if codec is None:
            host, reasons[axis] = _through_shared_memory(group, model)
            if host is not None:
                hosts[axis] = host
                continue
        decision, settings[axis] = _judge(config, group, model)
        chosen[axis], reasons[axis] = decision.compress, decision.reason
        if codec is not None:
            chosen[axis], reasons[axis] = True, "choosing bits, as requested"
    own, adaptive, active = Block(), None, True
    if isinstance(codec, Block):
        own = codec
    else:
        active = _anywhere(groups, any(chosen.values()))
        adaptive = _agreed(groups, [settings[axis] for axis in settings if chosen[axis]])
    if adaptive is not None:
        own = family_codec(adaptive.family, config.start_bits)
        overrides = {
            pattern: replace(each, stochastic=own.stochastic) if isinstance(each, Block) else each
            for pattern, each in (overrides or {}).items()
        }
    explanation = "; ".join(f"{axis} axis: {reason}" for axis, reason in reasons.items())
    weights_measured = weight_bits == "auto" and not isinstance(codec, Block)  # else only what was asked for
    if weight_bits == "auto":
        weight_bits = None
        pays = chosen.get("shard", False) and "shard" not in hosts
        if weights_measured:
            if pays:
                weights = _judge_weights(groups["shard"], model)
                pays, explanation = weights.compress, f"{explanation}; {weights.reason}"
            if _anywhere(groups, pays):
                weight_bits = WEIGHT_BITS
    elif weight_bits is not None and "shard" in groups:
        explanation += f"; weights are gathered in {weight_bits} bits"
    if weight_bits is None and not active:
        return explanation
    pieces, fixed = choose_bits(sizes, own, overrides or {}, min_numel)
    compression = FsdpCompression(
        model,
        own,
        pieces,
        weight_bits=weight_bits,
        weights_measured=weights_measured,
        seed=seed,
        shard=chosen.get("shard", False),
        replicate=chosen.get("replicate", False),
        hosts=hosts,
        fixed=fixed,
        error_feedback=bool(error_feedback),
    )
    state = attach_state(model)
    state.fsdp_compression = compression
    if adaptive is not None:
        # The replicas of a shard send the same: as with tensor-parallel ranks, one rank decides for all.
        first, *others = groups.values()
        controller = Controller(
            compression, config, adaptive, group=first, tensor_group=others[0] if others else None
        )
        compression.watcher = state.adaptive = controller
        for close in controller.closers:  # which do not hold the model
            weakref.finalize(model, close).atexit = False
    for host in hosts.values():
        weakref.finalize(model, host.close).atexit = False
    if chosen.keys() <= hosts.keys():
        return explanation
    kept = sum(numel for numel, bits, _ in compression.pieces.values() if bits == 0)
    share = kept / sum(numel for numel, _, _ in compression.pieces.values())
    return f"{explanation}; small or excluded parameters ({share:.1%} of the values) are sent exactly"


def _through_shared_memory(group: dist.ProcessGroup, model: torch.nn.Module) -> tuple[Hierarchy | None, str]:
    """The shared memory of an axis whose ranks are on one host, if it is faster than their backend; and why."""
    from trimtab.measure.exchange import measure_exchange
    from trimtab.planning.compression.payoff import decide_shared_memory

    parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
    device = local_device(parameters[0])
    host = one_host(group, device)
    if host is None:
        return None, ""
    numel = sum(p.numel() for p in parameters)
    exchange = measure_exchange(Uncompressed(), (group, group), device, numel, hierarchy=host)
    decision = decide_shared_memory(exchange, sum(p.numel() * p.element_size() for p in parameters))
    if not decision.compress:
        host.close()
        return None, decision.reason
    return host, decision.reason


def _judge_weights(group: dist.ProcessGroup, model: torch.nn.Module) -> Decision:
    """Whether gathering the weights in fewer bits pays over these ranks, as measured. Collective."""
    from trimtab.doors.fsdp import gathered_values
    from trimtab.measure.exchange import measure_gather
    from trimtab.planning.compression.payoff import decide_weights

    dtype, numel = gathered_values(model)
    device = local_device(next(model.parameters()))
    exchange = measure_gather(group, device, dtype, numel, bits=WEIGHT_BITS)
    return decide_weights(exchange, numel * dtype.itemsize)


def _judge(
    config: Adaptive, group: dist.ProcessGroup, model: torch.nn.Module
) -> tuple[Decision, PlannerSettings]:
    """Measure the families that need no error feedback on an axis: whether the fastest pays, and its settings."""
    from trimtab.measure.exchange import measure_exchanges
    from trimtab.planning.compression.payoff import decide

    parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
    suitable = passed_families(optimizer=ADAMW) if config.family is None else {config.family}
    ways = {
        name: (family_codec(family, family.expected), False)
        for name, family in FAMILIES.items()
        if name in suitable and not family.error_feedback
    }
    if not ways:
        raise TrimtabError(
            f"compress: the family {config.family!r} is not offered with fully_shard; use another"
        )
    numel = sum(p.numel() for p in parameters)
    exchanges = measure_exchanges(ways, (group, group), local_device(parameters[0]), numel)
    name = min(exchanges, key=lambda each: (exchanges[each].compressed_s, each))
    decision = decide(exchanges[name], sum(p.numel() * p.element_size() for p in parameters))
    settings = PlannerSettings(name=name, gbit_per_s=exchanges[name].gbit_per_s)
    return decision, settings if config.family is not None else replace(settings, fastest=BITS)


def _agreed(
    groups: Mapping[str, dist.ProcessGroup], own: Sequence[PlannerSettings]
) -> PlannerSettings | None:
    """The settings of the slowest axis that any rank of the mesh compresses. Collective."""
    known = list(own)
    for group in groups.values():
        slowest = min(known, key=lambda each: (each.gbit_per_s, each.name), default=None)
        known = [each for each in gather_choices(slowest, group) if each is not None]
    return min(known, key=lambda each: (each.gbit_per_s, each.name), default=None)


def _anywhere(groups: Mapping[str, dist.ProcessGroup], here: bool) -> bool:
    """Whether it holds on any rank of the mesh: the groups along an axis decide by themselves. Collective."""
    for group in groups.values():
        here = any(gather_choices(here, group))
    return here
