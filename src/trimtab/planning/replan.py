"""Makes a new plan from a plan: for the measured times of its ranks, or for other ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum

from trimtab.errors import TrimtabError
from trimtab.planning.job_search import AHEAD, GAIN, SLOWER
from trimtab.planning.plan import Plan, Role
from trimtab.planning.precision.allocate import allocate
from trimtab.planning.precision.options import (
    AdditiveJob,
    Chosen,
    damage_of,
    damages_of,
    lowered,
    memory_of,
    own_only,
)
from trimtab.planning.precision.plan_tradeoffs import PlanTradeoffs, choices_of, chosen_of
from trimtab.planning.precision.starting_point import Lowerable
from trimtab.planning.roles import RoleLayout, even, layout
from trimtab.planning.shares.with_precision import Shared, quickest

MIN_SPEEDUP = 1.025
"""A new plan must make the step faster by this factor."""

SPARED = 0.9
"""Or be as fast with at most this fraction of the damage."""

REPLANNED, _OTHER_RANKS = "replanned during training: ", "made anew for "


def replan(plan: Plan, observed: Mapping[str, float]) -> Plan:
    """The plan that fits the observed times, or the same plan if no change is worthwhile.

    It chooses among the `choices` of the plan's roles, whose seconds are assumed to add up and to grow with samples;
    what the step takes beyond its slowest rank's computation is assumed to stay the same. A new plan must make the step
    faster by a factor of `MIN_SPEEDUP`, or be as fast with at most `SPARED` of the damage; it need not be as fast where
    the running plan's damage has outgrown its budget (`with_current_damages`). Model, ranks, batch size, mode, budget
    and bits stay.

    Args:
        observed: measured compute seconds of a step by role, without waiting and communication. Roles that are
            missing count as predicted. Every rank passes the same numbers, so all get the same plan.

    Raises:
        TrimtabError: a role that the plan does not have, or an invalid time.
    """
    for name, seconds in observed.items():
        if name not in plan.roles:
            raise TrimtabError(f"replan: the plan has no role {name!r}; it has {', '.join(plan.roles)}")
        if not 0 < seconds < float("inf"):
            raise TrimtabError(f"replan: {seconds} seconds is not a valid compute time of {name}")
    tradeoffs = PlanTradeoffs(plan, observed)
    present = _Candidate(
        plan, tradeoffs, _layout(plan), {name: chosen_of(role) for name, role in plan.roles.items()}
    )
    try:
        proposed = _free(plan, tradeoffs) if plan.batch == "free" else _fixed(plan, tradeoffs, present)
    except TrimtabError:  # nothing else fits the memory; the running plan does
        return plan
    if proposed.same_as(present):
        return plan
    as_fast = proposed.step_s <= present.step_s * (1 + 1e-3)
    faster = present.step_s >= MIN_SPEEDUP * proposed.step_s
    spares = proposed.damage <= SPARED * present.damage
    # Damages that were sampled since may be more than was allowed; then a slower step is right.
    beyond = 0 < plan.budget < SPARED * present.damage
    if not faster and not (spares and (as_fast or beyond)):
        return plan
    drift = ", ".join(
        f"{name} took {seconds / plan.roles[name].compute_s:.3g} times the predicted time"
        for name, seconds in observed.items()
    )
    return proposed.plan(f"{REPLANNED}{drift}")


def devices_of(plan: Plan) -> list[str]:
    """The device class of every rank of a plan."""
    return [plan.roles[name].device for name, count in plan.ranks for _ in range(count)]


def plan_for_ranks(plan: Plan, devices: Sequence[str | None]) -> Plan:
    """The plan for other ranks than it was made for, after ranks were lost or gained.

    It chooses among the `choices` of the plan's roles, as `replan` does. Model, batch size, mode, budget and bits stay.

    Args:
        devices: the device class of every rank that is there. None, for a rank of which nothing is known, stands for
            one that the plan has and no other rank is, or else for the slowest.

    Raises:
        TrimtabError: the plan knows nothing of a device class, or its batch cannot be divided among these ranks.
    """
    tradeoffs = PlanTradeoffs(plan, {})
    present = _known(plan, tradeoffs, devices)
    if present == devices_of(plan):
        return plan
    if plan.tensor_groups:
        raise TrimtabError(
            f"the plan has tensor groups of {plan.tensor_size} ranks, and for other ranks they would hold other units; "
            "make a new plan with `trimtab plan`"
        )
    if plan.wrapper == "fsdp" and len(present) != plan.world_size:
        raise TrimtabError(
            f"the plan shards the model over {plan.world_size} ranks, and what a rank of {len(present)} would have to "
            "hold is not in it; make a new plan with `trimtab plan`"
        )
    if plan.batch_size < len(present):
        raise TrimtabError(
            f"a batch of {plan.batch_size} samples cannot be divided among {len(present)} ranks"
        )
    reason = f"{_OTHER_RANKS}{len(present)} ranks from the plan for {plan.world_size}"
    job = layout(present, even(present, plan.batch_size))
    same = {name: chosen_of(tradeoffs.roles[device]) for name, device in job.devices.items()}
    base = _Candidate(plan, tradeoffs, job, same).plan(reason)
    tradeoffs = PlanTradeoffs(base, {})
    if base.batch == "free":
        return _free(base, tradeoffs).plan(reason)
    return _fixed(base, tradeoffs, _Candidate(base, tradeoffs, job, same)).plan(reason)


def _known(plan: Plan, tradeoffs: PlanTradeoffs, devices: Sequence[str | None]) -> list[str]:
    """The devices, with one of the plan's in place of each None."""
    absent = devices_of(plan)
    for device in devices:
        if device is not None and device not in tradeoffs.roles:
            raise TrimtabError(f"the plan knows nothing of {device}; it has {', '.join(tradeoffs.roles)}")
        if device in absent:
            absent.remove(device)
    slowest = max(tradeoffs.roles, key=lambda device: tradeoffs.menu(device, plan.batch_size).own_s)
    return [device or (absent.pop(0) if absent else slowest) for device in devices]


class _Candidate:
    """A job that could be run from now on, with its predicted times."""

    def __init__(
        self, plan: Plan, tradeoffs: PlanTradeoffs, job: RoleLayout, chosen: Mapping[str, Chosen]
    ) -> None:
        self.old, self.tradeoffs, self.job, self.chosen = plan, tradeoffs, job, chosen
        before = max(role.compute_s - role.after_s for role in plan.roles.values())
        exposed = max(0.0, plan.predicted.step_s - before)
        meet = {
            name: tradeoffs.reduce_s(device, job.samples[name], chosen[name])
            for name, device in job.devices.items()
        }
        self.step_s = max(meet.values()) + exposed
        self.after = {
            name: tradeoffs.roles[d].after_s * tradeoffs.slower[d] for name, d in job.devices.items()
        }
        self.compute = {name: seconds + self.after[name] for name, seconds in meet.items()}
        self.damage = fsum(
            job.counts[name] * damage_of(tradeoffs.menu(device, job.samples[name]).options, chosen[name])
            for name, device in job.devices.items()
        )

    def same_as(self, other: _Candidate) -> bool:
        return self._signature() == other._signature()

    def _signature(self) -> list[tuple[int, Chosen, int]]:
        return [(self.job.samples[name], lowered(self.chosen[name]), count) for name, count in self.job.ranks]

    def plan(self, reason: str) -> Plan:
        old = self.old
        replaced = (REPLANNED, _OTHER_RANKS) if reason.startswith(_OTHER_RANKS) else REPLANNED
        kept = tuple(earlier for earlier in old.reasons if not earlier.startswith(replaced))
        route = old.route
        if route is not None and self._devices() != devices_of(old):
            route = replace(route, spared=())  # who is behind a slow link is known only of the old ranks
        return replace(
            old,
            roles={name: self._role(name) for name in self.job.devices},
            ranks=self.job.ranks,
            route=route,
            predicted=replace(
                old.predicted, step_s=self.step_s, plain_step_s=self._plain_s(), damage=self.damage
            ),
            reasons=(*kept, reason),
        )

    def _role(self, name: str) -> Role:
        device, samples, chosen = self.job.devices[name], self.job.samples[name], self.chosen[name]
        old, tradeoffs = self.tradeoffs.roles[device], self.tradeoffs
        return replace(
            old,
            samples=samples,
            precisions=lowered(chosen),
            compute_s=self.compute[name],
            fixed_s=min(old.fixed_s * tradeoffs.slower[device], self.compute[name]),
            after_s=min(self.after[name], self.compute[name]),
            peak_bytes=max(0, tradeoffs.peak(device, samples, chosen)),
            choices=choices_of(tradeoffs.menu(device, samples).options, chosen),
        )

    def _devices(self) -> list[str]:
        return [self.job.devices[name] for name, count in self.job.ranks for _ in range(count)]

    def _plain_s(self) -> float:
        """Plain DDP as it would be now, with the observed time of its slowest rank."""
        slowest = [
            max(
                known.menu(device, own[0]).own_s for device, own in even(devices, self.old.batch_size).items()
            )
            for known, devices in (
                (PlanTradeoffs(self.old, {}), devices_of(self.old)),
                (self.tradeoffs, self._devices()),
            )
        ]
        return max(0.0, self.old.predicted.plain_step_s - slowest[0]) + slowest[1]


def _free(plan: Plan, tradeoffs: PlanTradeoffs) -> _Candidate:
    devices = devices_of(plan)
    counts = {device: devices.count(device) for device in dict.fromkeys(devices)}

    def job(shared: Shared) -> _Candidate:
        made = layout(devices, shared.samples)
        chosen = {
            role: tradeoffs.chosen(device, made.samples[role], shared.seconds)
            for role, device in made.devices.items()
        }
        return _Candidate(plan, tradeoffs, made, chosen)

    lowering = job(quickest(tradeoffs, counts, plan.batch_size, budget=plan.budget))
    if not lowering.damage:
        return lowering
    try:
        sharing = job(quickest(tradeoffs, counts, plan.batch_size, budget=0.0))
    except TrimtabError:  # memory leaves no choice but to lower
        return lowering
    return sharing if sharing.step_s < GAIN * lowering.step_s else lowering


def _fixed(plan: Plan, tradeoffs: PlanTradeoffs, present: _Candidate) -> _Candidate:
    job = present.job
    menus = {name: tradeoffs.menu(device, job.samples[name]) for name, device in job.devices.items()}
    fastest = min(menu.own_s for menu in menus.values())
    roles = {
        name: Lowerable(
            damages=damages_of(menu.options),
            ranks=job.counts[name],
            memory_bytes=tradeoffs.limits[job.devices[name]],
        )
        for name, menu in menus.items()
        if menu.own_s > SLOWER * fastest or not tradeoffs.fits(job.devices[name], job.samples[name], {})
    }
    own = {name: own_only(menu.options) for name, menu in menus.items()}
    plain = _Candidate(plan, tradeoffs, job, own)
    if not roles:
        return plain
    others = max((menu.own_s for name, menu in menus.items() if name not in roles), default=0.0)
    additive = AdditiveJob(
        {name: menus[name].options for name in roles},
        base_s={name: menus[name].base_s for name in roles},
        base_bytes={
            name: tradeoffs.peak(job.devices[name], job.samples[name], own[name])
            - memory_of(menus[name].options, own[name])
            for name in roles
        },
        least_s=others,
    )
    lowering = _Candidate(
        plan, tradeoffs, job, {**own, **allocate(additive, roles, others_s=others, ahead=AHEAD).chosen}
    )
    fits = all(tradeoffs.fits(job.devices[name], job.samples[name], {}) for name in roles)
    return plain if fits and plain.step_s < GAIN * lowering.step_s else lowering


def _layout(plan: Plan) -> RoleLayout:
    return RoleLayout(
        devices={name: role.device for name, role in plan.roles.items()},
        samples={name: role.samples for name, role in plan.roles.items()},
        ranks=plan.ranks,
    )
