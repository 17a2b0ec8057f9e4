"""Makes a `Plan` from a cluster's profile, a workload and damages, with the reasons in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import fsum
from typing import Literal

from trimtab.cluster import Cluster
from trimtab.errors import TrimtabError
from trimtab.planning.plan import PLAN_VERSION, Plan, Predicted, Role
from trimtab.planning.plan_search import BUDGET, GAIN, JobCandidate, PlanSearch
from trimtab.planning.precision.options import lowered
from trimtab.planning.precision.plan_tradeoffs import choices_of
from trimtab.precision_names import OWN
from trimtab.predict.replay.timeline import bottleneck
from trimtab.workload import Workload

Bits = int | Literal["adaptive", "auto"] | None

TRIED = (8, 4)
"""Bits that "auto" compares with uncompressed gradients."""


def make_plan(
    cluster: Cluster,
    workload: Workload,
    damages: Mapping[str, Mapping[str, float]],
    *,
    model: str,
    trimtab: str,
    batch_size: int,
    batch: Literal["fixed", "free"] = "free",
    budget: float = BUDGET,
    bits: Bits = "auto",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Decide what every rank does. Pure: the same input gives the same plan on any machine.

    Args:
        cluster: with its profile.
        damages: by operator and precision, for a rank that computes the whole batch.
        model: fingerprint of the model.
        batch_size: of all ranks together; it does not change.
        batch: "fixed" gives every rank the same share and lowers only slow ranks; "free" lets shares follow speed,
            and lowers operators where that gains more.
        budget: damage allowed with "free".
        bits: of gradients; "auto" takes the fastest of uncompressed and the measured ones of `TRIED`.

    Raises:
        TrimtabError: something was not measured or does not fit; the message says what to do.
    """
    search = PlanSearch(cluster, workload, damages, batch_size, progress=progress)
    plain = search.plain()
    chosen = search.choose(batch, _bits_to_try(search, bits), budget, plain)
    damage = search.damage_of(chosen)
    uniform = search.uniform_damage()
    return Plan(
        version=PLAN_VERSION,
        trimtab=trimtab,
        model=model,
        batch=batch,
        bits="adaptive" if bits == "adaptive" else chosen.bits,
        roles=_roles(search, chosen),
        ranks=chosen.job.ranks,
        predicted=Predicted(
            step_s=chosen.step_s, plain_step_s=plain.step_s, damage=damage, uniform_damage=uniform
        ),
        budget=budget if batch == "free" else 0.0,
        reasons=tuple(_reasons(search, plain, chosen, batch, bits, damage, budget)),
    )


def _bits_to_try(search: PlanSearch, bits: Bits) -> tuple[int | None, ...]:
    measured = search.bits_measured()
    if len(search.devices) == 1:
        return (None,)
    if bits == "auto":
        return (None, *(b for b in TRIED if b in measured))
    if bits == "adaptive":
        if not measured:
            raise TrimtabError(
                "the codec was not measured on every device class, so the gain of adaptive bits cannot be predicted; "
                "run `trimtab probe --bits 4` there, or plan with --bits none"
            )
        return (4 if 4 in measured else min(measured),)
    return (bits,)


def _roles(search: PlanSearch, candidate: JobCandidate) -> dict[str, Role]:
    job, tradeoffs = candidate.job, search.tradeoffs
    tradeoffs.bits = candidate.bits
    times = {role.name: role for role in candidate.replayed.timeline().roles}
    roles = {}
    for name, device in job.devices.items():
        samples, precisions = job.samples[name], candidate.chosen[name]
        menu, more = tradeoffs.menu(device, samples), tradeoffs.menu(device, samples + 1)
        picked = {operator: precisions.get(operator, OWN) for operator in menu.options}
        seconds = [
            one.base_s
            + fsum(o.seconds for op, p in picked.items() for o in one.options.get(op, ()) if o.precision == p)
            for one in (menu, more)
        ]
        after = candidate.replayed.optimizer_s(name)
        fixed = max(0.0, seconds[0] - samples * (seconds[1] - seconds[0])) + after
        peak = tradeoffs.peak(device, samples, picked)
        roles[name] = Role(
            device=device,
            kind=search.cluster.devices[device].kind,
            samples=samples,
            precisions=lowered(precisions),
            compute_s=times[name].compute_s,
            peak_bytes=peak,
            memory_bytes=tradeoffs.limits[device],
            fixed_s=min(fixed, times[name].compute_s),
            after_s=min(after, times[name].compute_s),
            bytes_per_sample=float(max(0, tradeoffs.peak(device, samples + 1, picked) - peak)),
            choices=choices_of(menu.options, picked),
        )
    return roles


def _reasons(
    search: PlanSearch,
    plain: JobCandidate,
    chosen: JobCandidate,
    batch: str,
    bits: Bits,
    damage: float,
    budget: float,
) -> list[str]:
    reasons: list[str] = []
    waits = {role.name: role for role in plain.replayed.timeline().roles}
    own = {name: time.own_s for name, time in waits.items()}
    slow, fast = max(own, key=lambda n: own[n]), min(own, key=lambda n: own[n])
    if own[slow] > 1.02 * own[fast]:
        reasons.append(
            f"with even shares {slow} computes {_ms(own[slow])} a step and {fast} {_ms(own[fast])}, so "
            f"that {fast} waits"
        )
    else:
        reasons.append("with even shares all ranks compute for about the same time")
    job = chosen.job
    counts = job.counts
    if batch == "free":
        shares = ", ".join(f"{job.samples[n]} for each of {counts[n]} {n}" for n in job.devices)
        reasons.append(f"shares follow speed, which does not change the result: {shares}")
    reasons += _lowered_reasons(search, chosen, batch, damage, budget)
    reasons += _bits_reasons(search, chosen, bits)
    estimated = [d for d in search.counts if search.profile.devices[d].estimated]
    if estimated:
        reasons.append(f"the times of {', '.join(estimated)} are estimated from datasheets, not measured")
    gain = plain.step_s / chosen.step_s
    if gain >= 1.005:
        return [
            *reasons,
            f"a step is predicted to take {_ms(chosen.step_s)} instead of plain DDP's {_ms(plain.step_s)}: "
            f"{gain:.3g} times as fast",
        ]
    tried = "".join(
        f"; in {count} bits it would take {_ms(seconds)}"
        for count, seconds in search.tried.items()
        if count is not None and count != chosen.bits
    )
    return [
        *reasons,
        "nothing makes a step faster than plain DDP here",
        f"plain DDP's step takes {_ms(plain.step_s)}, most of it in {bottleneck(plain.replayed.timeline())}{tried}",
    ]


def _lowered_reasons(
    search: PlanSearch, candidate: JobCandidate, batch: str, damage: float, budget: float
) -> list[str]:
    lower = {name: lowered(chosen) for name, chosen in candidate.chosen.items()}
    if any(lower.values()):
        words = "; ".join(
            f"{name} lowers {len(own)} of {len(candidate.chosen[name])} operators "
            f"({', '.join(sorted(set(own.values())))})"
            for name, own in lower.items()
            if own
        )
        allowed = f" of {budget:.3g} allowed" if batch == "free" else ""
        reasons = [f"{words}: damage {damage:.3g}{allowed}"]
        for name, own in lower.items():
            device = candidate.job.devices[name]
            if own and not search.tradeoffs.fits(device, candidate.job.samples[name], {}):
                reasons.append(f"{name} would not fit its memory with nothing lowered")
        return reasons
    if len(_unprobed(search, candidate)) == len(search.counts):
        return ["nothing is lowered: no lower precision was probed; see `trimtab probe --precision`"]
    if batch == "free" and not budget:
        return ["nothing is lowered: no damage is allowed"]
    if batch == "free":
        return [f"nothing is lowered: that would gain less than {GAIN - 1:.0%} beyond the shares"]
    return [f"nothing is lowered: no rank is slow, or lowering it would gain less than {GAIN - 1:.0%}"]


def _unprobed(search: PlanSearch, candidate: JobCandidate) -> list[str]:
    """Device classes on which no operator can be lowered."""
    return [
        device
        for device in search.counts
        if not search.tradeoffs.menu(device, candidate.job.samples[candidate.job.of(device)[0]]).options
    ]


def _bits_reasons(search: PlanSearch, candidate: JobCandidate, bits: Bits) -> list[str]:
    if bits == "adaptive":
        return [f"bits adapt to the gradients during training; predicted with {candidate.bits}"]
    if bits != "auto" or len(search.devices) == 1:
        return []
    if candidate.bits is not None:
        return [f"gradients are sent in {candidate.bits} bits, which makes the step fastest"]
    if not search.bits_measured():
        return ["gradients are sent uncompressed: the codec was not measured on every device class"]
    return [f"gradients are sent uncompressed: fewer bits would gain less than {GAIN - 1:.0%}"]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
