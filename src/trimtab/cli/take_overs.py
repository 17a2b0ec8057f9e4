"""What `trimtab run` takes over in a process before the script runs: its wrappers, plan and batches."""

from __future__ import annotations

import functools
import weakref
from inspect import signature
from pathlib import Path
from typing import Any

from trimtab import environment
from trimtab.errors import TrimtabError
from trimtab.model_state import JobBound
from trimtab.report import events
from trimtab.run_settings import OwnSteps, RunSettings
from trimtab.selector import selected


class Script:
    """What is known of the script."""

    is_wrapped = False
    """Whether it has made a DistributedDataParallel, or trained an FSDP2 module."""


def take_over_ddp(settings: RunSettings) -> None:
    """From here on every new DistributedDataParallel is compressed where that pays, or runs as the plan says.

    With `local_steps` it takes those instead.

    A communication hook that the script registers takes precedence: trimtab's hook then passes every bucket to it.
    """
    from torch.nn.parallel import DistributedDataParallel

    from trimtab.api.compress import compress
    from trimtab.control.autopilot.pilot import start_autopilot
    from trimtab.control.compression.bucket_caps import bucket_options
    from trimtab.control.compression.ddp import compression_of
    from trimtab.control.compression.explanation import record_explanation
    from trimtab.control.plans.applying import apply_launch_plan, launch_bucket_cap_mb
    from trimtab.control.running_local_steps import local_steps_of
    from trimtab.control.step_recorder import observe_backward, record_steps
    from trimtab.measure.products import refuse_wrong_products

    if events.active():
        observe_backward()
    every, adjust = settings.local_steps, selected(settings.adjust)
    construct, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    @functools.wraps(construct)
    def construct_and_compress(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        if OwnSteps.running:
            construct(self, *args, **kwargs)
            return
        Script.is_wrapped = True
        given = signature(construct).bind(self, *args, **kwargs).arguments
        cap = launch_bucket_cap_mb()
        if cap is not None and "bucket_cap_mb" not in given:
            kwargs["bucket_cap_mb"] = cap
        elif "bits" in adjust and every is None:
            kwargs |= bucket_options(given)
        construct(self, *args, **kwargs)
        record_steps(self)
        refuse_wrong_products(next(self.parameters()).device)  # DDP has at least one
        if every is not None and _take_local_steps(self, every, settings.max_penalty):
            return
        if not apply_launch_plan(self) and "bits" in adjust:
            try:
                compress(self)
            except TrimtabError as error:  # nobody asked for it in so many words: the script goes on without
                record_explanation(self, f"gradients are sent as by plain DDP: {error}")
        compression = compression_of(self)
        if compression is not None:
            compression.automatic = True
        if settings.auto:
            start_autopilot(self, adjust if settings.batch_sizes == "auto" else adjust - {"shares"})

    @functools.wraps(register)
    def register_or_defer(self: DistributedDataParallel, state: object, hook: Any) -> None:
        compression, local = compression_of(self), local_steps_of(self)
        own = isinstance(getattr(hook, "__self__", None), JobBound)
        if compression is not None and compression.automatic:
            compression.defer_to(state, hook)
        elif own or local is None or not local.defer(state, hook):
            register(self, state, hook)

    DistributedDataParallel.__init__ = construct_and_compress  # type: ignore[method-assign]
    DistributedDataParallel.register_comm_hook = register_or_defer  # type: ignore[method-assign]


def take_over_fsdp(settings: RunSettings) -> None:
    """From here on every model of `fully_shard` modules is compressed where that pays, or runs as the plan says.

    Which module is the whole model shows when it trains: in its first forward pass that keeps gradients.
    """
    import torch
    import torch.distributed.fsdp as torch_fsdp
    from torch import nn

    from trimtab.model_state import JobHook

    shard = torch_fsdp.fully_shard
    seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trains = module.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        if module in seen or OwnSteps.running or not trains:
            return
        seen.update(module.modules())
        hooks = set(module._forward_pre_hooks)
        _take_over_sharded(module, settings)
        for key, hook in list(module._forward_pre_hooks.items()):
            if key not in hooks:  # torch calls those that were there when the pass began
                keywords = (kwargs,) if key in module._forward_pre_hooks_with_kwargs else ()
                hook(module, args, *keywords)

    hook_between_graphs = torch.compiler.disable(before_forward)

    @functools.wraps(shard)
    def shard_and_watch(module: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = shard(module, *args, **kwargs)
        for each in (module,) if isinstance(module, nn.Module) else module:
            each.register_forward_pre_hook(JobHook(hook_between_graphs), prepend=True, with_kwargs=True)
        return sharded

    torch_fsdp.fully_shard = shard_and_watch


def _take_over_sharded(model: Any, settings: RunSettings) -> None:
    """Compress an FSDP2 model, or apply the plan, before it trains for the first time. Collective."""
    from trimtab.api.compress import compress
    from trimtab.control.compression.explanation import record_explanation
    from trimtab.control.compression.fsdp import fsdp_compression_of, is_fsdp, spans_all_ranks
    from trimtab.control.plans.active_plan import active_plan_of
    from trimtab.control.plans.applying import apply_launch_plan
    from trimtab.control.running_local_steps import local_steps_of
    from trimtab.control.step_recorder import record_steps
    from trimtab.model_state import state_of

    if local_steps_of(model) is not None or not is_fsdp(model):
        return
    Script.is_wrapped = True
    record_steps(model)
    if settings.local_steps is not None and _take_local_steps(
        model, settings.local_steps, settings.max_penalty
    ):
        return
    if fsdp_compression_of(model) is not None or state_of(model).explanation or active_plan_of(model):
        return  # the script has decided itself
    if not spans_all_ranks(model):
        record_explanation(
            model,
            "gradients are sent as by plain FSDP2: this model is sharded over some of the ranks, which trimtab run "
            "leaves alone; trimtab.compress(model) compresses it",
        )
    elif not apply_launch_plan(model) and "bits" in selected(settings.adjust):
        try:
            compress(model)
        except TrimtabError as error:  # nobody asked for it in so many words: the script goes on without
            record_explanation(model, f"gradients are sent as by plain FSDP2: {error}")
    if settings.auto and events.is_first_rank():
        environment.logger().info("autopilot: FSDP2 models get bits and batch shares, and no plan")


def _take_local_steps(model: Any, every: str, max_penalty: float) -> bool:
    """Whether the model takes local steps; where they were not asked for in so many words it may go on without."""
    from trimtab.api.local_steps import local_steps

    try:
        local_steps(model, every="auto" if every == "auto" else int(every), max_penalty=max_penalty)
    except TrimtabError as error:
        if every != "auto":
            raise
        environment.logger().warning("%s; gradients are exchanged in every step", error)
        return False
    return True


def take_over_plan(settings: RunSettings) -> None:
    """The launcher's plan is the one that models are run under and loaders follow."""
    if settings.plan is not None:
        from trimtab.control.plans.active_plan import LaunchPlan

        LaunchPlan.path = Path(settings.plan)
        LaunchPlan.adjust = selected(settings.adjust)


def take_over_batches(settings: RunSettings) -> None:
    """The script's batches are cut among the ranks; a plan has shares of its own."""
    planned = settings.plan is not None
    if "shares" in selected(settings.adjust) and not planned and settings.batch_sizes != "equal":
        from trimtab.control.shares.launch import cut_batches

        cut_batches(settings.batch_sizes)


TAKE_OVERS = (take_over_plan, take_over_ddp, take_over_fsdp, take_over_batches)
"""What is done before the script runs, in this order. Each looks at the settings and imports what it needs."""


def take_over_process(settings: RunSettings) -> None:
    """All of it, once for a process, and not with TRIMTAB_DISABLE=1."""
    if environment.disabled() or RunSettings.in_force is not None:
        return
    RunSettings.in_force = settings
    for take_over in TAKE_OVERS:
        take_over(settings)
