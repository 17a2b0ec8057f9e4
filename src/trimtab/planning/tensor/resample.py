"""New batch shares of a plan's tensor groups, from the measured times of a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from trimtab.planning.plan import Plan, Role
from trimtab.planning.replan import MIN_SPEEDUP, REPLANNED
from trimtab.planning.shares.batch import share_batch


def resample(plan: Plan, seconds: Sequence[float]) -> Plan:
    """The plan with samples that let all tensor groups finish together, or the same plan if that gains too little.

    Everything else stays: the units that ranks hold, and how groups exchange their gradients. A new plan must make the
    slowest group faster by a factor of `MIN_SPEEDUP`.

    Args:
        seconds: for each group, the measured time of a step with its present samples, without waiting for other
            groups. Every rank passes the same numbers, so all get the same plan.
    """
    members = [[plan.roles[plan.role_of(rank)] for rank in group] for group in plan.tensor_groups]
    fixed, per_sample = [], []
    for group_roles, measured in zip(members, seconds, strict=True):
        slowest = max(group_roles, key=lambda role: role.compute_s)
        fixed.append(measured * slowest.fixed_s / slowest.compute_s)
        per_sample.append((measured - fixed[-1]) / slowest.samples)
    if min(per_sample) <= 0:
        return plan  # more samples take no longer
    samples = share_batch(plan.batch_size, per_sample, fixed=fixed, most=[_most(own) for own in members])
    pace = max(f + each * n for f, each, n in zip(fixed, per_sample, samples, strict=True))
    gain = max(seconds) / pace
    if samples == plan.shares or gain < MIN_SPEEDUP:
        return plan
    roles: dict[str, Role] = {}
    of_rank: dict[int, str] = {}
    names: dict[tuple[str, int], str] = {}
    for group, own in zip(plan.tensor_groups, samples, strict=True):
        for rank in group:
            old = plan.role_of(rank)
            if (old, own) not in names:
                name = old
                while name in roles:
                    name += "_"
                names[old, own] = name
                roles[name] = _with_samples(plan.roles[old], own)
            of_rank[rank] = names[old, own]
    runs = tuple((name, len(list(run))) for name, run in groupby(of_rank[rank] for rank in sorted(of_rank)))
    kept = tuple(reason for reason in plan.reasons if not reason.startswith(REPLANNED))
    before, after = ("/".join(map(str, shares)) for shares in (plan.shares, samples))
    reason = f"{REPLANNED}tensor groups share the batch as {after} instead of {before}: {gain - 1:.0%} faster"
    return replace(
        plan,
        roles=roles,
        ranks=runs,
        predicted=replace(plan.predicted, step_s=plan.predicted.step_s / gain),
        reasons=(*kept, reason),
    )


def _most(roles: Sequence[Role]) -> int | None:
    """The samples for which all ranks of a group have memory; None for no limit."""
    limits = [
        role.samples + max(0, int((role.memory_bytes - role.peak_bytes) // role.bytes_per_sample))
        for role in roles
        if role.memory_bytes is not None and role.bytes_per_sample
    ]
    return min(limits, default=None)


def _with_samples(role: Role, samples: int) -> Role:
    growing = (role.compute_s - role.fixed_s) / role.samples
    more = round((samples - role.samples) * role.bytes_per_sample)
    return replace(
        role,
        samples=samples,
        compute_s=role.fixed_s + growing * samples,
        peak_bytes=max(0, role.peak_bytes + more),
    )
