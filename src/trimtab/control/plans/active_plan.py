"""The plan that a job runs under: the same on all ranks, with the loaders and clocks that depend on it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch.distributed as dist
from torch import nn

from trimtab.control.plans.present_ranks import NoPlanForRanksError, PresentRanks
from trimtab.environment import logger
from trimtab.errors import TrimtabError
from trimtab.measure.local_clock import LocalClock
from trimtab.model_state import find_state
from trimtab.planning.plan import Plan
from trimtab.report import events
from trimtab.selector import ALL


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A change to another plan, and why."""

    step: int
    before: str
    """Hash of the previous plan."""
    after: str
    reasons: tuple[str, ...]


class SharesSamples(Protocol):
    """Divides the samples of a step among the ranks."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a step for each rank."""
        ...

    def take_shares(self, plan: Plan) -> None:
        """Use the batch shares of this plan from the next step that is not prefetched."""


class ActivePlan:
    """The current plan; all ranks replace it between the same two steps."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.history: list[Switch] = []
        self.loaders: WeakSet[SharesSamples] = WeakSet()
        """Loaders that divide samples as the plan says."""
        self._last_loader: ref[SharesSamples] | None = None
        self.clocks: WeakSet[LocalClock] = WeakSet()
        """Clocks that time the ranks under this plan."""
        self.notes: tuple[str, ...] = ()
        """What applying it did, for `trimtab.explain`."""

    @property
    def last_loader(self) -> SharesSamples | None:
        """The loader of the last trained batch; None if the script has its own."""
        return None if self._last_loader is None else self._last_loader()

    def record_batch_of(self, loader: SharesSamples) -> None:
        """The current batch comes from this loader."""
        self._last_loader = ref(loader)

    def replace(self, plan: Plan) -> None:
        """Switch to another plan, with all loaders; every rank calls it between the same two steps."""
        self.plan = plan
        for loader in list(self.loaders):
            loader.take_shares(plan)


class LaunchPlan:
    """The plan of `trimtab run --plan`, for every model and loader of the process."""

    path: Path | None = None
    active: ActivePlan | None = None
    adjust = ALL
    """What of the plan may be used."""

    @classmethod
    def read(cls) -> Plan:
        """The plan in its file, or the one that runs already."""
        from trimtab.planning.restrict import restricted

        if cls.active is not None:
            return cls.active.plan
        assert cls.path is not None
        return restricted(read_plan(cls.path), cls.adjust)

    @classmethod
    def give_up(cls, error: NoPlanForRanksError, rank: int) -> None:
        """Train without a plan: it cannot be made for the ranks that are there."""
        if rank == 0:
            logger().warning("%s: training goes on without a plan: %s", cls.path, error)
        cls.path = None


def require_same_steps(active: ActivePlan | None, plan: Plan) -> None:
    """Raise if a loader divides steps as the current plan says, and this one divides them otherwise."""
    if active is not None and active.loaders and active.plan.accumulate != plan.accumulate:
        raise TrimtabError(
            f"a loader of this model divides a step into {active.plan.accumulate} micro-batches, and the plan into "
            f"{plan.accumulate}; apply the plan before making the loader"
        )


def active_plan_of(model: nn.Module) -> ActivePlan | None:
    """The plan that was applied to a model, or to the model inside a DDP module; None if there is none."""
    active: ActivePlan | None = find_state(model, "active_plan")
    return active


def read_plan(plan: Plan | str | os.PathLike[str]) -> Plan:
    """A plan, or the plan in a file."""
    from trimtab.planning.plan import Plan, load_plan

    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | os.PathLike):
        return load_plan(Path(plan))
    raise TrimtabError(f"expected a Plan or the path of its file, got {type(plan).__name__}")


def plan_text(plan: Plan) -> str:
    """A plan as text for `parse_plan`."""
    from pydantic import TypeAdapter

    from trimtab.planning.plan import Plan as PlanType

    return TypeAdapter(PlanType).dump_json(plan).decode()


def emit_plan(plan: Plan, before: Plan | None, reasons: Sequence[str]) -> None:
    """Record that a plan is in force from now on; rank 0 calls it."""
    if not events.active():
        return
    tree = json.loads(plan_text(plan))
    for role in tree["roles"].values():
        role.pop("choices", None)
    events.emit("plan", hash=plan.hash, plan=tree)
    noticed, why = ("", reasons) if before is None or not reasons else (reasons[0], reasons[1:])
    events.emit(
        "decision",
        what="plan",
        noticed=noticed or None,
        decided=f"plan {plan.hash}" + ("" if before is None else f" instead of {before.hash}"),
        why="; ".join(why) or None,
        expected={"step_s": plan.predicted.step_s, "plain_step_s": plan.predicted.plain_step_s},
        before=None if before is None else before.hash,
        after=plan.hash,
    )


def agree_on_plan(load: Callable[[], Plan], group: dist.ProcessGroup | None) -> Plan:
    """This rank's plan, if all ranks have the same and can run it; otherwise every rank raises. Collective.

    1. Every rank loads and checks its plan; an error is kept, not raised.
    2. The ranks exchange the plan's hash, or the error.
    3. Each rank raises its own error, or that of another rank: no rank waits for one that gave up.
    """
    plan: Plan | None = None
    failure: Exception | None = None
    try:
        plan = load()
    except Exception as error:
        failure = error
    mine = (plan.hash if plan is not None else None, None if failure is None else str(failure))
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
    if failure is not None:
        raise failure
    for rank, (_, message) in enumerate(everyone):
        if message is not None:
            raise TrimtabError(f"rank {rank} cannot run its plan, so no rank starts: {message}")
    ranks_of: dict[str, list[int]] = {}
    for rank, (hashed, _) in enumerate(everyone):
        ranks_of.setdefault(hashed, []).append(rank)
    if len(ranks_of) > 1:
        listed = "; ".join(f"{hashed} on ranks {_listed(ranks)}" for hashed, ranks in ranks_of.items())
        raise TrimtabError(f"the ranks have different plans: {listed}; give every rank the same plan file")
    assert plan is not None
    return plan


def active_plan_for(
    plan: Plan | str | os.PathLike[str] | nn.Module | None, group: dist.ProcessGroup | None
) -> ActivePlan | None:
    """The plan that a loader should follow, if there is one; collective, if there is.

    A model stands for the plan it runs under; without `plan`, that of `trimtab run --plan` is followed.
    """
    from torch import nn

    if isinstance(plan, nn.Module):
        active = active_plan_of(plan)
        if active is None:
            raise TrimtabError(
                "loader: no plan was applied to this model; call trimtab.apply(model, plan) first, or pass the plan"
            )
        return active
    if plan is None and LaunchPlan.path is None:
        return None
    if plan is None and LaunchPlan.active is not None:
        return LaunchPlan.active
    present = PresentRanks(group)
    try:
        active = ActivePlan(
            agree_on_plan(lambda: present.fit(LaunchPlan.read() if plan is None else read_plan(plan)), group)
        )
    except NoPlanForRanksError as error:
        if plan is not None:
            raise
        LaunchPlan.give_up(error, present.rank)
        return None
    present.record(active.plan)
    if plan is None:
        LaunchPlan.active = active
    return active


def _listed(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:8]))
    return some if len(ranks) <= 8 else f"{some} and {len(ranks) - 8} more"
