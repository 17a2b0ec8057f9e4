"""Applying a plan to a model on this rank: precisions, compressed gradients, and following the ranks' speeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from glob import escape
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab import environment
from trimtab.codec import Block
from trimtab.control.compression.adaptive import Adaptive
from trimtab.control.compression.ddp import compress_ddp, compresses, compression_of
from trimtab.control.compression.explanation import record_explanation
from trimtab.control.compression.fsdp import is_fsdp
from trimtab.control.compression.planned_bits import start_from_plan
from trimtab.control.plans.active_plan import (
    ActivePlan,
    LaunchPlan,
    active_plan_of,
    agree_on_plan,
    emit_plan,
    plan_text,
    read_plan,
    require_same_steps,
)
from trimtab.control.plans.follower import Follow, Follower
from trimtab.control.plans.present_ranks import NoPlanForRanksError, PresentRanks
from trimtab.control.plans.sharded import compress_sharded, require_wrapper
from trimtab.control.plans.tensor_layout import group_of, require_layout
from trimtab.control.plans.validation import require_runnable, require_same_bits
from trimtab.control.rank_values import rank_and_world_size
from trimtab.control.step_recorder import record_steps
from trimtab.doors.ddp import has_other_hook
from trimtab.errors import TrimtabError
from trimtab.model_state import attach_state
from trimtab.planning.plan import Plan, parse_plan
from trimtab.planning.replan import devices_of, plan_for_ranks
from trimtab.planning.restrict import restricted
from trimtab.precision.results import CallCounter
from trimtab.precision.setting import set_operators
from trimtab.selector import ALL
from trimtab.workload.buckets import MIB


def apply_plan(
    model: nn.Module,
    plan: Plan | str | PathLike[str],
    *,
    seed: int = 0,
    follow: Follow | None,
    adjust: frozenset[str] = ALL,
) -> None:
    """As `trimtab.apply`. Collective."""
    _agree_and_apply(
        model, lambda: restricted(read_plan(plan), adjust), active_plan_of(model), seed=seed, follow=follow
    )


def apply_launch_plan(model: nn.Module) -> bool:
    """Apply the plan of `trimtab run --plan`, which loaders may follow already, to a DDP or FSDP2 module. Collective.

    False if there is none, or none for the ranks that are there.
    """
    if LaunchPlan.path is None:
        return False
    try:
        LaunchPlan.active = _agree_and_apply(
            model, LaunchPlan.read, LaunchPlan.active, seed=0, follow=Follow()
        )
    except NoPlanForRanksError as error:
        LaunchPlan.give_up(error, rank_and_world_size(group_of(model), "apply")[0])
        return False
    return True


def _agree_and_apply(
    model: nn.Module,
    read: Callable[[], Plan],
    active: ActivePlan | None,
    *,
    seed: int,
    follow: Follow | None,
) -> ActivePlan:
    ddp = model if isinstance(model, DistributedDataParallel) else None
    root = _root(model)
    group = group_of(model)
    present = PresentRanks(group)
    rank = present.rank

    def load() -> Plan:
        unfitted = read()
        require_layout(model, unfitted)
        loaded = present.fit(unfitted)
        require_runnable(root, loaded, rank)
        require_wrapper(model, loaded)
        require_same_bits(model, loaded)
        require_same_steps(active, loaded)
        return loaded

    plan = agree_on_plan(load, group)
    if active is None:
        active = ActivePlan(plan)
    elif active.plan is not plan:
        active.replace(plan)
    # From here on nothing can be rejected.
    present.record(plan)
    _set_precisions(root, plan, rank, seed)
    attach_state(root).active_plan = active
    notes = [f"plan {plan.hash}: {_describe_roles(plan)}"]
    sharded = is_fsdp(model)
    if ddp is not None or sharded:
        if ddp is not None:
            notes += [_compress(ddp, plan, seed), *_what_the_script_does(ddp, plan)]
        else:
            notes.append(compress_sharded(model, plan, seed))
        state = attach_state(model)
        if state.plan_follower is not None:
            state.plan_follower.close()
            state.plan_follower = None
        fixed = plan.batch == "fixed" or len(plan.tensor_groups) == 1
        if plan.tensor_groups and (follow is None or fixed):
            notes.append(
                "the plan stays when speeds change: units of its tensor groups are moved by "
                "tensor_parallel(balance='auto') instead"
            )
        elif follow is not None and plan.world_size > 1:
            state.plan_follower = Follower(
                model, active, follow, switch=lambda new: _set_precisions(root, new, rank, seed)
            )
    elif plan.bits is not None and len(plan.tensor_groups) != 1:
        wrapped = "DDP" if plan.wrapper == "ddp" else "sharded"
        notes.append(f"gradients are not compressed: apply the plan to the {wrapped} module for that")
    active.notes = tuple(notes)
    if rank == 0:
        environment.logger().info("%s", "; ".join(notes))
        emit_plan(plan, None, plan.reasons)
    record_steps(model)
    return active


def explain_plan(model: nn.Module) -> str | None:
    """What the plan of a model did, if it runs under one."""
    active = active_plan_of(model)
    if active is None:
        return None
    text = "; ".join(active.notes)
    if not active.history or active.history[-1].after != active.plan.hash:  # no switch since the last `apply`
        return text
    last = active.history[-1]
    return f"{text}; since step {last.step} plan {last.after}: {'; '.join(last.reasons)}"


def plan_state(model: nn.Module) -> dict[str, Any] | None:
    """The active plan and the position of its random streams, for a checkpoint; None without a plan."""
    active = active_plan_of(model)
    if active is None:
        return None
    calls = _calls(_root(model))
    return {"plan": plan_text(active.plan), "calls": 0 if calls is None else int(calls.count)}


def load_plan_state(model: nn.Module, state: Mapping[str, Any]) -> str:
    """Resume with the plan of a checkpoint, made anew if it is for other ranks; returns what became of it."""
    plan = parse_plan(state["plan"], source="the plan in the checkpoint")
    root = _root(model)
    group = group_of(model)
    rank, world_size = rank_and_world_size(group, "apply")
    active, saved = active_plan_of(model), plan
    devices = [None] * world_size if active is None else devices_of(active.plan)
    if plan.world_size != world_size or Counter(devices) == Counter(devices_of(plan)):
        try:
            plan = plan_for_ranks(saved, devices)
        except TrimtabError as error:
            return f"the plan for {saved.world_size} ranks is dropped ({error})"
    if active is None:
        apply_plan(model, plan, follow=Follow())
    elif active.plan.hash != plan.hash:
        require_runnable(root, plan, rank)
        follower = attach_state(model).plan_follower
        rules = None if follower is None else follower.rules
        try:
            _agree_and_apply(model, lambda: plan, active, seed=0, follow=rules)
        except TrimtabError as error:
            return f"the checkpoint's plan is dropped, and the applied one continues ({error})"
    calls = _calls(root)
    if calls is not None:
        calls.count = torch.full_like(calls.count, state["calls"])
    if plan is saved:
        return "the plan continues"
    samples = environment.listed_by_rank(plan.shares)
    return f"the plan for {saved.world_size} ranks is made anew for {world_size}, with {samples} samples"


def _set_precisions(root: nn.Module, plan: Plan, rank: int, seed: int) -> None:
    """Set the precisions of this rank's role. Random streams continue where they were."""
    before = _calls(root)
    set_operators(root, plan.roles[plan.role_of(rank)].precisions, seed=seed)
    after = _calls(root)
    if before is not None and after is not None:
        after.count = before.count


def _compress(ddp: DistributedDataParallel, plan: Plan, seed: int) -> str:
    """Compress gradients as the plan says, unless that is decided already; returns what happens to them."""
    state = attach_state(ddp)
    if state.compression_plan is not None:
        return "gradients are sent as under the previous plan"
    compression = compression_of(ddp)
    if compression is not None and not compresses(ddp):
        return "gradients are summed exactly, through the shared memory of the host"
    if compression is not None and compression.automatic:
        return start_from_plan(ddp, plan)
    if compression is not None:
        return f"gradients are sent as set by trimtab.compress ({compression.codec}), not as in the plan"
    if has_other_hook(ddp):
        return "gradients are sent by the module's own communication hook, not as in the plan"
    state.compression_plan = plan
    if plan.bits is None:
        return "gradients are not compressed"
    codec = Adaptive() if plan.bits == "adaptive" else Block(bits=plan.bits)
    overrides = {
        escape(name): None if bits is None else Block(bits=bits) for name, bits in plan.layer_bits.items()
    }
    explanation = compress_ddp(ddp, codec, overrides=overrides, seed=seed, planned_route=plan.route)
    record_explanation(ddp, explanation)
    others = f" ({len(overrides)} parameters in others)" if overrides else ""
    return f"gradients in {plan.bits} bits{others}"


def _what_the_script_does(ddp: DistributedDataParallel, plan: Plan) -> list[str]:
    """What a plan leaves to the script, where that is not done."""
    notes = []
    cap = plan.bucket_cap_mb
    if cap is not None and ddp.bucket_bytes_cap != int(cap * MIB):
        notes.append(
            f"the plan's buckets are of {cap:g} MB, and DDP has them of {ddp.bucket_bytes_cap / MIB:g} MB: construct "
            f"DistributedDataParallel(model, bucket_cap_mb={cap:g})"
        )
    if plan.accumulate > 1:
        notes.append(
            f"a step has {plan.accumulate} micro-batches: take them from trimtab.loader, with "
            "`with data.sync(ddp):` around forward and backward, and step the optimizer where data.last"
        )
    return notes


def launch_bucket_cap_mb() -> float | None:
    """The `bucket_cap_mb` of the plan of `trimtab run --plan`; None if it has none or cannot be read yet."""
    if LaunchPlan.path is None:
        return None
    try:
        return LaunchPlan.read().bucket_cap_mb
    except TrimtabError:
        return None  # all ranks refuse it together when it is applied


def _describe_roles(plan: Plan) -> str:
    descriptions = []
    for name, count in plan.ranks:
        chosen = list(plan.roles[name].precisions.values())
        lowered = ", ".join(f"{chosen.count(value)} in {value}" for value in sorted(set(chosen)))
        role = name if count == 1 else f"{count} x {name}"
        descriptions.append(f"{role}: {lowered or 'no operator'} lowered, {plan.roles[name].samples} samples")
    return "; ".join(descriptions)


def _root(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _calls(root: nn.Module) -> CallCounter | None:
    return next((hook for hook in root._forward_pre_hooks.values() if isinstance(hook, CallCounter)), None)
