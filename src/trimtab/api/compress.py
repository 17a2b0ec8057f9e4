"""`trimtab.compress`: gradients in fewer bits, where that pays."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trimtab import environment
from trimtab.codec import Block, Codec
from trimtab.collectives import find_hosts
from trimtab.control.compression.adaptive import Adaptive, Controller
from trimtab.control.compression.family_codec import family_codec
from trimtab.control.compression.fsdp import compress_fsdp, fsdp_compression_of, is_fsdp
from trimtab.control.compression.layer_log import LayerLog
from trimtab.control.compression.levels import Levels, choose_levels
from trimtab.control.plans.active_plan import in_force_of
from trimtab.doors.ddp import DdpCompression, refuse_python_reducer, stage_groups
from trimtab.errors import TrimtabError
from trimtab.measure.exchange import measure_exchanges
from trimtab.model_state import attach_state, state_of
from trimtab.planning.compression.bit_planner import PlannerSettings
from trimtab.planning.compression.family import AT_FIRST, FAMILIES, passed_families
from trimtab.planning.compression.payoff import Decision, decide_family
from trimtab.wire_format import MIN_NUMEL

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

_BUCKET_BYTES = 25 << 20
"""What DDP gathers before it sends, unless told otherwise."""


def compress(
    model: DistributedDataParallel,
    codec: Codec | Adaptive | None = None,
    *,
    overrides: Mapping[str, Codec | None] | None = None,
    min_numel: int = MIN_NUMEL,
    error_feedback: bool | None = None,
    seed: int = 0,
    weight_bits: int | None = None,
    log: str | Path | None = None,
    log_every: int = 100,
) -> DistributedDataParallel:
    """Send the gradients of a DDP module in fewer bits; in place, and returns the module.

    Every rank calls it, with the same arguments, after constructing DDP and before the first
    backward pass. In a script under `trimtab run` it takes the place of what that chose.

    Args:
        codec: how to encode. Without it trimtab measures the link and either chooses the bits of every
            layer while training runs (`Adaptive`) or, where that would not pay,
            leaves the module exactly as it is. With it (for example ``Block(bits=8)``,
            ``PowerSGD(rank=4)``) there is no such choice.
        overrides: codecs by parameter-name pattern, first match first; None leaves uncompressed.
        min_numel: parameters with fewer values, or with one axis, travel uncompressed.
        error_feedback: add what one step left out to the next; by default only for biased codecs.
        seed: of the stochastic rounding.
        weight_bits: with FSDP2, gather the weights in so many bits too, rounded to the nearest.
        log: file for a JSON line per layer every `log_every` steps, with its bytes and error (rank 0's).
    """
    if environment.disabled():
        return _explained(model, "TRIMTAB_DISABLE is set: nothing is compressed")
    if is_fsdp(model):
        said = compress_fsdp(
            model,
            codec,
            overrides=overrides,
            min_numel=min_numel,
            error_feedback=error_feedback,
            seed=seed,
            weight_bits=weight_bits,
        )
        return _explained(model, said, say=dist.get_rank() == 0)
    if weight_bits is not None:
        raise TrimtabError("compress: weight_bits is for FSDP2; DDP sends no weights")
    if not isinstance(model, DistributedDataParallel):
        raise TrimtabError(
            f"compress: {type(model).__name__} is not a DistributedDataParallel; wrap the model first: "
            "ddp = DistributedDataParallel(model); trimtab.compress(ddp)"
        )
    before = compression_of(model)
    if before is not None and not before.automatic:
        raise TrimtabError("compress: this module is compressed already; call it once")
    if before is None and getattr(model, "_comm_hooks", None):
        raise TrimtabError("compress: this module has a communication hook of its own; register only one")
    refuse_python_reducer()
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    rank, world = dist.get_rank(model.process_group), dist.get_world_size(model.process_group)
    if world == 1:
        return _explained(model, "one rank: there is nothing to send, so nothing to compress")
    chosen = groups = None
    reason = f"compressing with {codec}, as asked"
    if codec is None and not any(p.dim() > 1 and p.numel() >= min_numel for p in parameters):
        return _explained(model, "no parameter is large enough to be worth compressing", say=rank == 0)
    if codec is None or isinstance(codec, Adaptive):
        chosen = _choose(model, codec or Adaptive(), error_feedback)
        groups, reason = chosen.groups, chosen.decision.reason
        if not chosen.decision.compress:
            if codec is None:
                return _explained(model, reason, say=rank == 0)
            reason = f"choosing bits of the family {chosen.settings.name}, as asked"
        codec, error_feedback = chosen.codec, chosen.settings.family.error_feedback
        overrides = {
            pattern: replace(own, stochastic=codec.stochastic) if isinstance(own, Block) else own
            for pattern, own in (overrides or {}).items()
        }
    observe = None
    if log and rank == 0:
        observe = LayerLog(log, lambda: compression.codec, every=log_every, seed=seed, rank=rank)
    levels = _levels(model, codec) if isinstance(codec, Block) else None
    compression = DdpCompression(
        model,
        codec,
        overrides=overrides,
        min_numel=min_numel,
        error_feedback=error_feedback,
        seed=seed,
        observe=observe,
        groups=groups,
        hierarchy=None if levels is None else levels.hierarchy,
        method=None if levels is None else levels.method,
    )
    state = attach_state(model)
    state.adaptive = None  # the controller of what `trimtab run` chose
    if chosen is not None:
        controller = Controller(compression, chosen.config, chosen.settings, group=chosen.groups[0])
        compression.watcher = state.adaptive = controller
        weakref.finalize(model, controller.close).atexit = False
    model.register_comm_hook(None, compression.reduce)
    state.compression = compression
    # With the module gone its threads have no work left. Not at exit: a dead peer would block it.
    weakref.finalize(model, compression.close).atexit = False
    said = f"{reason}; {_coverage(compression)}"
    if levels is not None and (levels.hierarchy is not None or levels.method is not None):
        said = f"{said}; {levels.reason}"
        if levels.hierarchy is not None:
            weakref.finalize(model, levels.hierarchy.close).atexit = False
    return _explained(model, said, say=rank == 0)


def _levels(model: DistributedDataParallel, codec: Block) -> Levels | None:
    """How to go through hosts of several ranks; None where there is one host. Collective."""
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    if find_hosts(model.process_group, parameters[0].device).count == 1:
        return None
    nbytes = sum(p.numel() * p.element_size() for p in parameters)
    return choose_levels(model.process_group, parameters[0].device, codec, min(nbytes, _BUCKET_BYTES))


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """What measuring the job's own link led to."""

    config: Adaptive
    settings: PlannerSettings
    decision: Decision
    groups: tuple[dist.ProcessGroup, ...]

    @property
    def codec(self) -> Block:
        return family_codec(self.settings.family, self.config.start_bits)


def _choose(model: DistributedDataParallel, config: Adaptive, error_feedback: bool | None) -> _Chosen:
    """Measure every family that may serve, and take the fastest. Collective."""
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    names = [
        name
        for name, family in FAMILIES.items()
        if (config.family == name or (config.family is None and name in passed_families()))
        and error_feedback in (None, family.error_feedback)
    ]
    if not names:
        raise TrimtabError(
            f"compress: there is no family {config.family!r} with error_feedback={error_feedback}; "
            f"choose among {', '.join(FAMILIES)}"
        )
    groups = stage_groups(model.process_group, parameters[0].device)
    exchanges = measure_exchanges(
        {
            name: (family_codec(family, family.expected), family.error_feedback)
            for name, family in FAMILIES.items()
            if name in names
        },
        groups,
        parameters[0].device,
        sum(p.numel() for p in parameters),
    )
    name, decision = decide_family(exchanges, sum(p.numel() * p.element_size() for p in parameters))
    settings = PlannerSettings(name=name, gbit_per_s=exchanges[name].gbit_per_s)
    if config.family is None and not error_feedback:
        settings = replace(settings, name=AT_FIRST, fastest=name)
        words = f"{decision.reason} (that is for SGD; any other optimiser gets {AT_FIRST})"
        decision = replace(decision, reason=words) if decision.compress else decision
    return _Chosen(config=config, settings=settings, decision=decision, groups=groups)


def compression_of(model: torch.nn.Module) -> DdpCompression | None:
    """The compression at work on a module, if there is one."""
    compression = state_of(model).compression
    assert compression is None or isinstance(compression, DdpCompression)
    return compression


def adaptive_of(model: torch.nn.Module) -> Controller | None:
    """What chooses the bits of a module while it trains, if anything does: its history, its cost."""
    controller = state_of(model).adaptive
    assert controller is None or isinstance(controller, Controller)
    return controller


def observe_loss(model: torch.nn.Module, loss: torch.Tensor | float) -> None:
    """Tell trimtab the loss of a step, so that its guard sees when fewer bits do harm. Optional.

    Costs nothing: the value is read later, beside the training. A module without adaptive
    compression ignores it.
    """
    controller = adaptive_of(model)
    if controller is not None:
        controller.observe_loss(loss)


def explain(model: torch.nn.Module) -> str:
    """What trimtab decided for this module, and why."""
    from trimtab.api.apply import explain_plan

    said = [explain_plan(model), state_of(model).explanation]
    controller = adaptive_of(model)
    if controller is not None and controller.history:
        last = controller.history[-1]
        said.append(f"since step {last.step}: {last.reasons[0]}")
    return "; ".join(filter(None, said)) or "trimtab has not been asked to adjust this module"


def state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """What trimtab must find again to continue with the same bits and plan; goes into the checkpoint.

    Random streams are keyed by rank: save and load per rank when error feedback is on, otherwise
    rank 0's serves all.
    """
    compression, controller = fsdp_compression_of(model) or compression_of(model), adaptive_of(model)
    state = {} if compression is None else {"compression": compression.state_dict()}
    if controller is not None:
        state["adaptive"] = controller.state_dict()
    if (in_force := in_force_of(model)) is not None:
        from trimtab.api.apply import state_of_plan

        state["plan"] = state_of_plan(model, in_force)
    return state


def load_state_dict(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Continue from `state_dict`; a module that is not compressed ignores compression's part.

    Every rank calls it. A plan in the state is taken up, unless it is for another number of ranks.
    """
    if "plan" in state and not environment.disabled():
        from trimtab.api.apply import load_state_of_plan

        load_state_of_plan(model, state["plan"])
    compression, controller = fsdp_compression_of(model) or compression_of(model), adaptive_of(model)
    if controller is not None and "adaptive" in state:
        controller.load_state_dict(state["adaptive"])
    if compression is not None and "compression" in state:
        compression.load_state_dict(state["compression"])


def _explained(model: DistributedDataParallel, text: str, *, say: bool = True) -> DistributedDataParallel:
    attach_state(model).explanation = text
    if say:
        environment.logger().info(text)
    return model


def _coverage(compression: DdpCompression) -> str:
    total = sum(numel for numel, _, _ in compression.pieces.values())
    kept = [numel for numel, bits, _ in compression.pieces.values() if bits == 0]
    return f"{len(kept)} small or excluded parameters ({sum(kept) / total:.1%} of the values) travel exactly"
