"""Compressing the gradients of a DDP module: whether it pays, with which codec, over which route."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trimtab.codec import Block, Codec, PowerSGD, TopK, Uncompressed
from trimtab.codec.packing import DTYPES
from trimtab.collectives.groups import destroy_groups
from trimtab.collectives.hierarchy import Hierarchy, one_host
from trimtab.control.compression.adaptive import Adaptive, Controller, emit_bits, family_codec
from trimtab.control.compression.agreement import tensor_group
from trimtab.control.compression.bucket_caps import shorten_last_buckets
from trimtab.control.compression.host_route import HostRoute, choose_host_route, fixed_host_route
from trimtab.control.compression.layer_log import LayerLog
from trimtab.control.compression.past_decision import PastDecision
from trimtab.control.rank_values import gather_choices, gather_numbers
from trimtab.control.tensor.replicas import UnitReplicas
from trimtab.doors.ddp import DdpCompression, has_other_hook, refuse_python_reducer, stage_groups
from trimtab.environment import logger
from trimtab.errors import TrimtabError
from trimtab.measure.exchange import REPEATS, measure_exchange, measure_exchanges
from trimtab.model_state import attach_state, state_of
from trimtab.planning.compression.bit_planner import PlannerSettings
from trimtab.planning.compression.family import ADAMW, AT_FIRST, FAMILIES, passed_families
from trimtab.planning.compression.payoff import (
    Decision,
    decide,
    decide_family,
    decide_shared_memory,
    is_close,
)
from trimtab.report import events
from trimtab.sharding.unit_block import find_sharded_model
from trimtab.wire_format import MIN_NUMEL

if TYPE_CHECKING:
    from trimtab.predict.collectives import Route
    from trimtab.predict.exchange import Exchange

_BUCKET_BYTES = 25 << 20
"""DDP's default bucket size."""


def compress_ddp(
    model: DistributedDataParallel,
    codec: Codec | Adaptive | None = None,
    *,
    overrides: Mapping[str, Codec | None] | None = None,
    min_numel: int = MIN_NUMEL,
    error_feedback: bool | None = None,
    seed: int = 0,
    weight_bits: int | Literal["auto"] | None = None,
    log: str | Path | None = None,
    log_every: int = 100,
    route: str | None = None,
    planned_route: Route | None = None,
) -> str:
    """As `trimtab.compress`, for DDP; returns what was decided, and why. Collective.

    Args:
        planned_route: the route of a plan; by default links are measured and it is chosen here, unless it is
            requested by `route`.
    """
    require_compressible(model, weight_bits)
    parameters = _trained(model)
    rank, world_size = dist.get_rank(model.process_group), dist.get_world_size(model.process_group)
    if world_size == 1:
        return "one rank: there is nothing to send, so nothing to compress"
    observe = None
    if log and rank == 0:
        observe = LayerLog(
            log, lambda: state_of(model).compression.codec, every=log_every, seed=seed, rank=rank
        )
    fixed = planned_route, "as planned"
    if route is not None:
        fixed = _requested_route(codec, route), "as requested"
    choice = host_route = None
    siblings = tensor_group(model.module)
    sharded = find_sharded_model(model)
    replicas = None if sharded is None else sharded.replicas
    if replicas is not None and isinstance(codec, (PowerSGD, TopK)):
        raise TrimtabError(
            f"compress: {codec} needs whole parameters, and the replicas of this model divide its units differently; "
            "use trimtab.codec.Block, or equal shares without balance"
        )
    reason = f"compressing with {codec}, as requested"
    large = [p for p in parameters if p.dim() > 1 and p.numel() >= min_numel]
    if codec is None and not large:
        return "no parameter is large enough to be worth compressing"
    if codec is None and not any(p.dtype in DTYPES for p in large):
        return (
            f"not compressing: gradients in {str(large[0].dtype).removeprefix('torch.')} are sent as they are"
        )
    if codec is None and planned_route is None and (fixed[0] is None or fixed[0].inside is not None):
        hierarchy, why = _through_shared_memory(model, siblings, measured=fixed[0] is None)
        if hierarchy is not None:
            codec, error_feedback, reason = Uncompressed(), False, why
            host_route = HostRoute(hierarchy=hierarchy, method=None, reason=why)
    if codec is None or isinstance(codec, Adaptive):
        first = FAMILIES[AT_FIRST]
        host_route = _host_route(model, family_codec(first, first.expected), siblings, *fixed)
        choice = _choose_family(model, codec or Adaptive(), error_feedback, host_route)
        settings, decision = gather_choices((choice.settings, choice.decision), siblings)[0]
        choice = replace(choice, settings=settings, decision=decision)
        reason = choice.decision.reason
        if not choice.decision.compress:
            if codec is None:
                destroy_groups(choice.groups)
                if host_route.hierarchy is not None:
                    host_route.hierarchy.close()
                return reason
            reason = f"choosing bits of the family {choice.settings.name}, as requested"
        codec, error_feedback = choice.codec, choice.settings.family.error_feedback
        overrides = {
            pattern: replace(own, stochastic=codec.stochastic) if isinstance(own, Block) else own
            for pattern, own in (overrides or {}).items()
        }
    elif isinstance(codec, Block):
        host_route = _host_route(model, codec, siblings, *fixed)
    compression = DdpCompression(
        model,
        codec,
        overrides=overrides,
        min_numel=min_numel,
        error_feedback=error_feedback,
        seed=seed,
        observe=observe,
        groups=None if choice is None else choice.groups,
        hierarchy=None if host_route is None else host_route.hierarchy,
        method=None if host_route is None else host_route.method,
        spared=() if host_route is None else host_route.spared,
    )
    state = attach_state(model)
    state.adaptive = None  # the controller of what `trimtab run` chose
    if choice is not None:
        controller = Controller(
            compression, choice.config, choice.settings, group=choice.groups[0], tensor_group=siblings
        )
        compression.watcher = state.adaptive = controller
        weakref.finalize(model, controller.close).atexit = False
    free = choice is not None and planned_route is None and siblings is None and not has_other_hook(model)
    if free and shorten_last_buckets(model):
        reason = f"{reason}; DDP's last buckets are short, so that less of the exchange is exposed"
    model.register_comm_hook(None, compression.reduce)
    state.compression = compression
    # Without the module its threads have nothing to do. Not at exit: a dead peer would block it.
    weakref.finalize(model, compression.close).atexit = False
    if compresses(model):
        emit_bits(compression)
        reason = f"{reason}; {_coverage(compression)}"
    explanation = reason
    if isinstance(replicas, UnitReplicas) and isinstance(codec, Block):
        feedback = compression.feedback is not None
        replicas.compress(
            model.module,
            codec,
            overrides or {},
            min_numel,
            feedback=feedback,
            seed=seed,
            count_steps=lambda: compression.step,
        )
        explanation = f"{explanation}; units are averaged one by one, in {codec.bits} bits"
    if host_route is not None and (
        fixed[0] or host_route.hierarchy is not None or host_route.method is not None
    ):
        way = host_route.reason
        if way != reason:
            explanation = f"{explanation}; {way}"
        if events.is_first_rank():
            events.emit("decision", what="route", decided=way, why=way, expected={})
        if host_route.hierarchy is not None:
            weakref.finalize(model, host_route.hierarchy.close).atexit = False
    return explanation


def compression_of(model: torch.nn.Module) -> DdpCompression | None:
    """The compression of a module, if there is one."""
    compression: DdpCompression | None = state_of(model).compression
    return compression


def compresses(model: torch.nn.Module) -> bool:
    """Whether a module's gradients are encoded; those that ranks of one host sum through shared memory are not."""
    compression = compression_of(model)
    return compression is not None and not isinstance(compression.codec, Uncompressed)


def adaptive_of(model: torch.nn.Module) -> Controller | None:
    """The controller that chooses the bits of a module while it trains, if there is one: its history, its cost."""
    controller: Controller | None = state_of(model).adaptive
    return controller


def require_compressible(model: DistributedDataParallel, weight_bits: int | Literal["auto"] | None) -> None:
    """Refuse what `compress_ddp` would refuse on this rank."""
    if weight_bits not in (None, "auto"):
        raise TrimtabError("compress: weight_bits is for FSDP2; DDP sends no weights")
    if not isinstance(model, DistributedDataParallel):
        raise TrimtabError(
            f"compress: {type(model).__name__} is not a DistributedDataParallel; wrap the model first: "
            "ddp = DistributedDataParallel(model); trimtab.compress(ddp)"
        )
    compression = compression_of(model)
    if compression is not None and not compression.automatic:
        raise TrimtabError("compress: this module is already compressed; call it once")
    if compression is None and has_other_hook(model):
        raise TrimtabError("compress: this module has a communication hook of its own; register only one")
    refuse_python_reducer()


def _trained(model: DistributedDataParallel) -> list[torch.nn.Parameter]:
    return [p for p in model.module.parameters() if p.requires_grad]


def _host_route(
    model: DistributedDataParallel,
    codec: Block,
    siblings: dist.ProcessGroup | None,
    fixed: Route | None,
    words: str,
) -> HostRoute:
    """The route of the model's buckets between and inside hosts: the `fixed` one, or measured. Collective."""
    parameters = _trained(model)
    if fixed is not None:
        return fixed_host_route(model.process_group, parameters[0].device, fixed, words)
    nbytes = min(sum(p.numel() * p.element_size() for p in parameters), _BUCKET_BYTES)
    return choose_host_route(model.process_group, parameters[0].device, codec, nbytes, siblings)


def _requested_route(codec: object, name: str) -> Route:
    from trimtab.planning.compression.route import named_route

    if codec is not None and not isinstance(codec, Adaptive | Block):
        raise TrimtabError(
            f"compress: route={name!r} needs bits to choose from or a Block; {codec} has its own way"
        )
    return named_route(name)


def _through_shared_memory(
    model: DistributedDataParallel, siblings: dist.ProcessGroup | None, *, measured: bool
) -> tuple[Hierarchy | None, str]:
    """The shared memory of ranks that are all on one host, if it is faster than their backend; and why. Collective.

    Without `measured` it is taken as it is.
    """
    parameters = _trained(model)
    device, group = parameters[0].device, model.process_group
    hierarchy = one_host(group, device)
    everywhere = all(gather_choices(hierarchy is not None, siblings))
    if hierarchy is None:
        return None, ""
    reason = "tensor-parallel ranks have different hosts"
    if everywhere and not measured:
        return (
            hierarchy,
            "all ranks are on one host: gradients are summed exactly, through shared memory, as requested",
        )
    if everywhere:
        numel = sum(p.numel() for p in parameters)
        exchange = measure_exchange(Uncompressed(), (group, group), device, numel, hierarchy=hierarchy)
        decision = decide_shared_memory(exchange, sum(p.numel() * p.element_size() for p in parameters))
        decision = gather_choices(decision, siblings)[0]
        if decision.compress:
            return hierarchy, decision.reason
        reason = decision.reason
    if group.rank() == 0:
        logger().debug(reason)
    hierarchy.close()
    return None, reason


@dataclass(frozen=True, kw_only=True)
class _FamilyChoice:
    """The result of measuring the job's own link."""

    config: Adaptive
    settings: PlannerSettings
    decision: Decision
    groups: tuple[dist.ProcessGroup, ...]

    @property
    def codec(self) -> Block:
        return family_codec(self.settings.family, self.config.start_bits)


def _choose_family(
    model: DistributedDataParallel, config: Adaptive, error_feedback: bool | None, route: HostRoute
) -> _FamilyChoice:
    """Measure every applicable family on the job's route and choose the fastest. Collective."""
    parameters = _trained(model)
    names = [
        name
        for name, family in FAMILIES.items()
        if (config.family == name or (config.family is None and name in passed_families()))
        and error_feedback in (None, family.error_feedback)
    ]
    if not names:
        raise TrimtabError(
            f"compress: there is no family {config.family!r} with error_feedback={error_feedback}; "
            f"choose from {', '.join(FAMILIES)}"
        )
    device, numel = parameters[0].device, sum(p.numel() for p in parameters)
    gradient_bytes = sum(p.numel() * p.element_size() for p in parameters)
    groups = stage_groups(model.process_group, device)
    undecided = config.family is None and not error_feedback  # the family depends on the optimizer
    ways = {
        name: (family_codec(family, family.expected), family.error_feedback)
        for name, family in FAMILIES.items()
        if name in names or (undecided and name in passed_families(optimizer=ADAMW))
    }
    measure = partial(
        measure_exchanges, ways, groups, device, numel, hierarchy=route.hierarchy, method=route.method
    )
    exchanges = measure()
    if is_close(exchanges):
        if dist.get_rank(groups[0]) == 0:
            logger().debug("compressing pays hardly or not at all; measuring the link once more")
        exchanges = measure(repeats=4 * REPEATS)
    exchanges = _agreed(exchanges, groups[0])
    memory = PastDecision(gradient_bytes, groups[0], device)
    before = memory.recall()
    name, decision = decide_family({name: exchanges[name] for name in names}, gradient_bytes, before)
    first = name
    if undecided:  # whatever the optimizer turns out to be, compressing must pay
        first = min(passed_families(optimizer=ADAMW), key=lambda each: (exchanges[each].cost_s, each))
        decision = decide(exchanges[first], gradient_bytes, before)
    memory.remember(decision.compress)
    if dist.get_rank(groups[0]) == 0:
        for family, exchange in exchanges.items():
            logger().debug(
                f"{family}: {exchange.plain_s * 1e3:.1f} ms plain, {exchange.compressed_s * 1e3:.1f} ms in "
                f"{exchange.bits} bits, for {exchange.nbytes / 1e6:.1f} MB"
            )
        remembered = {None: "nothing is remembered", True: "compressed", False: "did not compress"}[before]
        logger().debug(f"family {name}; the last run of this job: {remembered}; {decision.reason}")
        _emit_decision(decision, exchanges[first].of(gradient_bytes))
    settings = PlannerSettings(name=name, gbit_per_s=exchanges[name].gbit_per_s)
    if undecided:
        settings = replace(settings, name=first, fastest=name)
        if decision.compress:
            reason = (
                f"{decision.reason}; bits are chosen per layer while training runs, to suit the optimizer"
            )
            decision = replace(decision, reason=reason)
    return _FamilyChoice(config=config, settings=settings, decision=decision, groups=groups)


def _agreed(exchanges: dict[str, Exchange], group: dist.ProcessGroup) -> dict[str, Exchange]:
    """With the computing time of the rank that needs most, so that all choose the same. Collective."""
    by_rank = gather_numbers([exchange.work_s for exchange in exchanges.values()], group)
    return {
        name: replace(exchange, work_s=max(each))
        for (name, exchange), each in zip(exchanges.items(), zip(*by_rank, strict=True), strict=True)
    }


def _emit_decision(decision: Decision, exchange: Exchange) -> None:
    events.emit(
        "decision",
        what="compress",
        noticed=f"a plain exchange takes {exchange.plain_s * 1e3:.1f} ms a step ({exchange.gbit_per_s:.2g} Gbit/s)",
        decided=f"compress, {exchange.bits} bits at first"
        if decision.compress
        else "send gradients uncompressed",
        why=decision.reason,
        expected={
            "plain_s": exchange.plain_s,
            "compressed_s": exchange.compressed_s,
            "gain": decision.gain,
            "gbit_per_s": exchange.gbit_per_s,
        },
        before=None,
        after=exchange.bits if decision.compress else None,
    )


def _coverage(compression: DdpCompression) -> str:
    total = sum(numel for numel, _, _ in compression.pieces.values())
    exact = [numel for numel, bits, _ in compression.pieces.values() if bits == 0]
    return (
        f"{len(exact)} small or excluded parameters ({sum(exact) / total:.1%} of the values) are sent exactly"
    )
