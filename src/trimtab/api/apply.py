"""`trimtab.apply`: a job as its plan says: precisions, compressed gradients, and another plan when ranks drift."""

from __future__ import annotations

import os
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab import environment
from trimtab.api.compress import compress, compression_of
from trimtab.api.set_precision import set_precision
from trimtab.codec import Block
from trimtab.control.compression.adaptive import Adaptive
from trimtab.control.plans.active_plan import (
    InForce,
    Launch,
    agreed,
    in_force_of,
    put_in_force,
    read,
    refuse_world,
    text_of,
)
from trimtab.control.plans.follower import Follow, Follower
from trimtab.errors import TrimtabError
from trimtab.measure.fingerprint import fingerprint
from trimtab.model_state import attach_state, state_of
from trimtab.precision.devices import refuse_unsupported
from trimtab.precision.operators import CallCounter, operators
from trimtab.precision_names import ATTENTION, Precision

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeVar

    from torch import nn

    from trimtab.planning.plan import Plan
    from trimtab.precision_names import OperatorKind

    Model = TypeVar("Model", bound=nn.Module)

_REMEDY = "make the plan anew with `trimtab plan`"


def apply(
    model: Model,
    plan: Plan | str | os.PathLike[str],
    *,
    seed: int = 0,
    follow: Follow | None = Follow(),  # noqa: B008  # frozen
) -> Model:
    """Run a model as a plan says; in place, and returns the model. Every rank calls it, before training.

    ::

        ddp = DistributedDataParallel(model)
        trimtab.apply(ddp, "plan.json")
        data = trimtab.loader(dataset, batch_size=256, plan=ddp)

    The operators of this rank's role compute in the plan's precisions. On a DDP module the gradients also travel
    as the plan says, and the ranks are watched: when the pace of the roles changes, all of them take up another
    plan between the same two steps. A plain module gets its precisions only. Applied again, the new plan takes the
    place of the old one.

    Args:
        plan: a `Plan`, or the path of its file.
        seed: of the stochastic rounding of precisions and gradients.
        follow: when to plan anew; None keeps the plan as it is.

    Raises:
        TrimtabError: on every rank, if any of them cannot run the plan: made for another model, number of ranks,
            device or version of trimtab, or not the same plan on all ranks. Nothing has been changed then.
    """
    if environment.disabled():
        return model
    ddp = model if isinstance(model, DistributedDataParallel) else None
    root = model if ddp is None else ddp.module
    group = None if ddp is None else ddp.process_group
    rank, world = _place(group)

    def own() -> Plan:
        found = read(plan)
        refuse(root, found, rank, world)
        _refuse_other_bits(ddp, found)
        return found

    found = agreed(own, group)
    in_force = in_force_of(root)
    if in_force is None:
        in_force = InForce(found)
    else:
        in_force.become(found)
    _take(root, ddp, in_force, rank, seed, follow)
    return model


def apply_launched(ddp: DistributedDataParallel) -> None:
    """As `apply`, with the plan of `trimtab run --plan`; loaders may deal out by it already. Collective."""
    rank, world = _place(ddp.process_group)
    assert Launch.path is not None
    path, in_force = Launch.path, Launch.in_force

    def own() -> Plan:
        found = read(path) if in_force is None else in_force.plan
        refuse(ddp.module, found, rank, world)
        return found

    plan = agreed(own, ddp.process_group)
    Launch.in_force = in_force = InForce(plan) if in_force is None else in_force
    _take(ddp.module, ddp, in_force, rank, 0, Follow())


def refuse(root: nn.Module, plan: Plan, rank: int, world: int) -> None:
    """Raise what keeps this rank from running the plan, with the difference shown."""
    if hasattr(root, "_orig_mod"):
        raise TrimtabError(
            "apply: this model is compiled already; apply the plan first, then torch.compile it"
        )
    if plan.trimtab != trimtab.__version__:
        raise TrimtabError(
            f"the plan was made by trimtab {plan.trimtab}, and this is {trimtab.__version__}; {_REMEDY}"
        )
    refuse_world(plan, world)
    known = _known(root)
    _refuse_other_model(root, plan, known)
    for name, role in plan.roles.items():
        for operator in role.precisions:
            if operator not in known:
                raise TrimtabError(
                    f"the plan lowers {operator!r} of role {name}, and the model has no such operator; "
                    f"{_similar(operator, known)}; {_REMEDY}"
                )
    called = plan.role_of(rank)
    own, device = plan.roles[called], _device(root)
    if own.kind is not None and own.kind != device.type:
        raise TrimtabError(
            f"rank {rank} has role {called}, which is for {own.kind} ({own.device}), and its model is on {device}; "
            "move the model there before trimtab.apply, or start the ranks in the order of the plan"
        )
    for operator, value in own.precisions.items():
        try:
            precision = Precision.of(value)
        except ValueError as error:
            raise TrimtabError(f"the plan's role {called}: {operator}: {error}; {_REMEDY}") from error
        refuse_unsupported(f"role {called}: {operator}", known[operator], precision, device)


def explain_plan(model: nn.Module) -> str | None:
    """What the plan of a model did, if it runs under one."""
    in_force = in_force_of(model)
    if in_force is None:
        return None
    text = "; ".join(in_force.notes)
    if not in_force.history:
        return text
    last = in_force.history[-1]
    return f"{text}; since step {last.step} plan {last.after}: {'; '.join(last.reasons)}"


def state_of_plan(model: nn.Module, in_force: InForce) -> dict[str, Any]:
    """The plan in force and where its random streams stand, for a checkpoint."""
    calls = _calls(_inside(model))
    return {"plan": text_of(in_force.plan), "calls": 0 if calls is None else int(calls.count)}


def load_state_of_plan(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Go on under the plan of a checkpoint. On another number of ranks the present one stays, and that is said."""
    from trimtab.planning.plan_file import parse_plan

    plan = parse_plan(state["plan"], source="the plan in the checkpoint")
    root = _inside(model)
    rank, world = _place(model.process_group if isinstance(model, DistributedDataParallel) else None)
    if plan.world_size != world:
        if rank == 0:
            environment.logger().warning(
                "the checkpoint's plan is for %d ranks, and this job has %d: it is not taken up",
                plan.world_size,
                world,
            )
        return
    before = in_force_of(model)
    if before is None:
        apply(model, plan)
    elif before.plan.hash != plan.hash:
        refuse(root, plan, rank, world)
        _set(root, plan, rank, 0)
        before.become(plan)
    calls = _calls(root)
    if calls is not None:
        calls.count = torch.full_like(calls.count, state["calls"])


def _take(
    root: nn.Module,
    ddp: DistributedDataParallel | None,
    in_force: InForce,
    rank: int,
    seed: int,
    follow: Follow | None,
) -> None:
    """Everything that the plan says of this rank; nothing can be refused any more."""
    plan = in_force.plan
    _set(root, plan, rank, seed)
    put_in_force(root, in_force)
    notes = [f"plan {plan.hash}: {_lowered(plan)}"]
    if ddp is not None:
        notes.append(_compress(ddp, plan, seed))
        state = attach_state(ddp)
        if state.plan_follower is not None:
            state.plan_follower.close()
            state.plan_follower = None
        if follow is not None and plan.world_size > 1:
            state.plan_follower = Follower(
                ddp, in_force, follow, switch=lambda new: _set(root, new, rank, seed)
            )
    elif plan.bits is not None:
        notes.append("gradients travel as they are: apply the plan to the DDP module to compress them")
    in_force.notes = tuple(notes)
    if rank == 0:
        environment.logger().info("%s", "; ".join(notes))


def _set(root: nn.Module, plan: Plan, rank: int, seed: int) -> None:
    """The precisions of this rank's role. Random streams go on where they were."""
    before = _calls(root)
    set_precision(root, plan.roles[plan.role_of(rank)].precisions, seed=seed)
    after = _calls(root)
    if before is not None and after is not None:
        after.count = before.count


def _compress(ddp: DistributedDataParallel, plan: Plan, seed: int) -> str:
    state = attach_state(ddp)
    if state.compression_plan is not None:
        return "gradients travel as under the plan before"
    before = compression_of(ddp)
    if before is not None:
        return f"gradients travel as trimtab.compress was told ({before.codec}), whatever the plan says"
    if getattr(ddp, "_comm_hooks", None):
        return "gradients travel by the module's own communication hook, whatever the plan says"
    state.compression_plan = plan
    if plan.bits is None:
        return "gradients travel as they are"
    compress(ddp, Adaptive() if plan.bits == "adaptive" else Block(bits=plan.bits), seed=seed)
    return f"gradients in {'adaptive' if plan.bits == 'adaptive' else plan.bits} bits"


def _refuse_other_bits(ddp: DistributedDataParallel | None, plan: Plan) -> None:
    earlier = state_of(ddp).compression_plan
    if earlier is not None and earlier.bits != plan.bits:
        raise TrimtabError(
            f"apply: gradients of this module travel in {earlier.bits or 'their own'} bits since the plan before, and "
            f"the new one says {plan.bits or 'their own'}; DDP takes one communication hook: make a new "
            "DistributedDataParallel for the new plan"
        )


def _lowered(plan: Plan) -> str:
    said = []
    for name, count in plan.ranks:
        chosen = list(plan.roles[name].precisions.values())
        what = ", ".join(f"{chosen.count(value)} in {value}" for value in sorted(set(chosen)))
        who = name if count == 1 else f"{count} x {name}"
        said.append(f"{who}: {what or 'no operator'} lowered, {plan.roles[name].samples} samples")
    return "; ".join(said)


def _known(root: nn.Module) -> dict[str, OperatorKind]:
    """Every name that a plan may lower."""
    found: dict[str, OperatorKind] = dict(operators(root))
    return found | {
        name + ATTENTION: "attention" for name, _ in root.named_modules() if name and name not in found
    }


def _refuse_other_model(root: nn.Module, plan: Plan, known: Mapping[str, OperatorKind]) -> None:
    own = fingerprint(root)
    if plan.model == own:
        return
    planned = {name for role in plan.roles.values() for name in (*role.choices, *role.precisions)}
    differences = []
    if lacking := sorted(planned - known.keys()):
        differences.append(f"the plan speaks of {_some(lacking)}, which this model lacks")
    if planned and (unplanned := [name for name in operators(root) if name not in planned]):
        differences.append(f"the plan does not speak of {_some(unplanned)}")
    if not differences:
        differences.append(
            "its operators have the names the plan knows, but other shapes, types or parameters"
        )
    raise TrimtabError(
        f"the plan is for another model (fingerprint {plan.model}, and this {type(root).__name__} has {own}): "
        f"{'; '.join(differences)}; {_REMEDY} for this model"
    )


def _similar(name: str, known: Mapping[str, OperatorKind]) -> str:
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else f"it has {_some(list(known))}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _inside(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _device(root: nn.Module) -> torch.device:
    first = next(root.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _calls(root: nn.Module) -> CallCounter | None:
    return next((hook for hook in root._forward_pre_hooks.values() if isinstance(hook, CallCounter)), None)


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TrimtabError(
            "apply: torchrun started several ranks, and they have not met yet; call "
            "torch.distributed.init_process_group() before trimtab.apply"
        )
    return 0, 1
