"""The plan a job runs under: that all ranks have the same one, and who learns when another takes its place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet, ref

import torch.distributed as dist

from trimtab.errors import TrimtabError
from trimtab.model_state import attach_state, find_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from trimtab.measure.local_clock import LocalClock
    from trimtab.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Switch:
    """Another plan from one step on, and why."""

    step: int
    before: str
    """Hash of the plan that ended."""
    after: str
    reasons: tuple[str, ...]


class TakesShares(Protocol):
    """What deals out the samples of a step."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a step for each rank."""
        ...

    def take_shares(self, plan: Plan) -> None:
        """Deal out as this plan says, from the next step that is not dealt out yet."""


class InForce:
    """One plan, the same on every rank, until another takes its place on all of them at once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.history: list[Switch] = []
        self.loaders: WeakSet[TakesShares] = WeakSet()
        """They deal out samples as the plan says."""
        self._dealer: ref[TakesShares] | None = None
        self.clocks: WeakSet[LocalClock] = WeakSet()
        """They count what ranks take under it."""
        self.notes: tuple[str, ...] = ()
        """What applying it did, in words."""

    @property
    def dealer(self) -> TakesShares | None:
        """Whose batch was trained on last; None for one of the script's own."""
        return None if self._dealer is None else self._dealer()

    def trained_on(self, loader: TakesShares) -> None:
        """A batch of this loader has got its loss."""
        self._dealer = ref(loader)

    def become(self, plan: Plan) -> None:
        """Another plan, for the loaders too; every rank calls it between the same two steps."""
        self.plan = plan
        for loader in list(self.loaders):
            loader.take_shares(plan)


class Launch:
    """The plan that `trimtab run --plan` was given, for every model and loader of the process."""

    path: Path | None = None
    in_force: InForce | None = None


def in_force_of(model: nn.Module) -> InForce | None:
    """The plan that a model runs under, if it was given one; a DDP module answers for the one inside."""
    active: InForce | None = find_state(model, "active_plan")
    return active


def put_in_force(root: nn.Module, in_force: InForce) -> None:
    attach_state(root).active_plan = in_force


def read(plan: Plan | str | os.PathLike[str]) -> Plan:
    """A plan as it is, or from its file."""
    from trimtab.planning.plan import Plan
    from trimtab.planning.plan_file import load_plan

    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | os.PathLike):
        return load_plan(Path(plan))
    raise TrimtabError(f"a plan is a Plan or the path of its file; got {type(plan).__name__}")


def text_of(plan: Plan) -> str:
    """A plan as `parse_plan` reads it."""
    from pydantic import TypeAdapter

    from trimtab.planning.plan import Plan as PlanType

    return TypeAdapter(PlanType).dump_json(plan).decode()


def agreed(own: Callable[[], Plan], group: dist.ProcessGroup | None) -> Plan:
    """This rank's plan, once all ranks have the same and none objects; otherwise every rank raises. Collective.

    1. Every rank reads and checks its plan; what goes wrong is kept, not raised.
    2. The ranks tell each other their hash, or what went wrong.
    3. Each raises what it found itself, or what another did: no rank is left waiting for one that gave up.
    """
    plan: Plan | None = None
    wrong: Exception | None = None
    try:
        plan = own()
    except Exception as error:
        wrong = error
    mine = (plan.hash if plan is not None else None, None if wrong is None else str(wrong))
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
    if wrong is not None:
        raise wrong
    refused = {rank: said for rank, (_, said) in enumerate(everyone) if said is not None}
    if refused:
        rank, said = next(iter(refused.items()))
        raise TrimtabError(f"rank {rank} cannot start with its plan, so no rank does: {said}")
    ranks_of: dict[str, list[int]] = {}
    for rank, (hashed, _) in enumerate(everyone):
        ranks_of.setdefault(hashed, []).append(rank)
    if len(ranks_of) > 1:
        listed = "; ".join(f"{hashed} on ranks {_listed(ranks)}" for hashed, ranks in ranks_of.items())
        raise TrimtabError(f"the ranks have different plans: {listed}; give every rank the same plan file")
    assert plan is not None
    return plan


def refuse_world(plan: Plan, world: int) -> None:
    """Refuse a plan for another number of ranks."""
    if plan.world_size == world:
        return
    roles = ", ".join(f"{count} x {name}" for name, count in plan.ranks)
    raise TrimtabError(
        f"the plan is for {plan.world_size} ranks ({roles}), and this job has {world}; start {plan.world_size}, or "
        "make the plan anew with `trimtab plan`"
    )


def in_force_for(
    plan: Plan | str | os.PathLike[str] | nn.Module | None, group: dist.ProcessGroup | None, world: int
) -> InForce | None:
    """The plan that a loader shall deal out by; None where there is none. Collective, where there is one.

    A model stands for the plan it runs under; without `plan`, that of `trimtab run --plan` counts.
    """
    from torch import nn

    if isinstance(plan, nn.Module):
        found = in_force_of(plan)
        if found is None:
            raise TrimtabError(
                "loader: no plan was applied to this model; call trimtab.apply(model, plan) first, or give the plan"
            )
        return found
    if plan is None and Launch.path is None:
        return None
    if plan is None and Launch.in_force is not None:
        return Launch.in_force
    given = plan if plan is not None else Launch.path

    def own() -> Plan:
        found = read(given)  # type: ignore[arg-type]
        refuse_world(found, world)
        return found

    in_force = InForce(agreed(own, group))
    if plan is None:
        Launch.in_force = in_force
    return in_force


def _listed(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:8]))
    return some if len(ranks) <= 8 else f"{some} and {len(ranks) - 8} more"
