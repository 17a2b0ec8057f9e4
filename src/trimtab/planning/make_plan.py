"""From what was measured to a `Plan`."""

from __future__ import annotations

from math import fsum
from typing import TYPE_CHECKING, Literal

from trimtab.errors import TrimtabError
from trimtab.planning.plan import PLAN_VERSION, Choice, Plan, Predicted, Role
from trimtab.planning.plan_search import BUDGET, GAIN, JobCandidate, PlanSearch
from trimtab.planning.precision.options import lowered
from trimtab.precision_names import OWN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trimtab.cluster import Cluster
    from trimtab.workload import Workload

Bits = int | Literal["adaptive", "auto"] | None

TRIED = (8, 4)
"""Bits that are tried where nothing is said of them."""


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
        damages: by operator and precision, of a rank that computes the whole batch.
        model: its fingerprint.
        batch_size: of all ranks together; it stays what it is.
        batch: "fixed" gives every rank the same share and lowers only slow ranks; "free" lets shares follow speed,
            and lowers where that gains beyond.
        budget: damage that "free" may do.
        bits: of gradients; "auto" takes those with the fastest step among none and those measured of `TRIED`.

    Raises:
        TrimtabError: what was not measured, or does not fit, and what to do.
    """
    search = PlanSearch(cluster, workload, damages, batch_size, progress=progress)
    plain = search.plain()
    found = search.choose(batch, _tried(search, bits), budget)
    damage = search.damage_of(found)
    uniform = search.uniform_damage()
    return Plan(
        version=PLAN_VERSION,
        trimtab=trimtab,
        model=model,
        batch=batch,
        bits="adaptive" if bits == "adaptive" else found.bits,
        roles=_roles(search, found),
        ranks=found.job.ranks,
        predicted=Predicted(
            step_s=found.step_s, plain_step_s=plain.step_s, damage=damage, uniform_damage=uniform
        ),
        budget=budget if batch == "free" else 0.0,
        reasons=tuple(_reasons(search, plain, found, batch, bits, damage, budget)),
    )


def _tried(search: PlanSearch, bits: Bits) -> tuple[int | None, ...]:
    known = search.bits_measured()
    if len(search.devices) == 1:
        return (None,)
    if bits == "auto":
        return (None, *(b for b in TRIED if b in known))
    if bits == "adaptive":
        if not known:
            raise TrimtabError(
                "the codec was not measured on every device class, so that what adaptive bits bring cannot be told; "
                "run `trimtab probe --bits 4` there, or plan with --bits none"
            )
        return (4 if 4 in known else min(known),)
    return (bits,)


def _roles(search: PlanSearch, found: JobCandidate) -> dict[str, Role]:
    job, tradeoffs = found.job, search.tradeoffs
    tradeoffs.bits = found.bits
    times = {role.name: role for role in found.replayed.timeline().roles}
    roles = {}
    for name, device in job.devices.items():
        samples, chosen = job.samples[name], found.chosen[name]
        menu, more = tradeoffs.menu(device, samples), tradeoffs.menu(device, samples + 1)
        picked = {operator: chosen.get(operator, OWN) for operator in menu.options}
        seconds = [
            one.base_s
            + fsum(o.seconds for op, p in picked.items() for o in one.options.get(op, ()) if o.precision == p)
            for one in (menu, more)
        ]
        after = found.replayed.optimizer_s(name)
        fixed = max(0.0, seconds[0] - samples * (seconds[1] - seconds[0])) + after
        peak = tradeoffs.peak(device, samples, picked)
        memory = {
            operator: next(o.memory for o in several if o.precision == picked[operator])
            for operator, several in menu.options.items()
        }
        roles[name] = Role(
            device=device,
            kind=search.cluster.devices[device].kind,
            samples=samples,
            precisions=lowered(chosen),
            compute_s=times[name].compute_s,
            peak_bytes=peak,
            memory_bytes=tradeoffs.limits[device],
            fixed_s=min(fixed, times[name].compute_s),
            after_s=min(after, times[name].compute_s),
            bytes_per_sample=float(max(0, tradeoffs.peak(device, samples + 1, picked) - peak)),
            choices={
                operator: {
                    o.precision: Choice(
                        seconds=o.seconds, damage=o.damage, memory=o.memory - memory[operator]
                    )
                    for o in several
                }
                for operator, several in menu.options.items()
            },
        )
    return roles


def _reasons(
    search: PlanSearch,
    plain: JobCandidate,
    found: JobCandidate,
    batch: str,
    bits: Bits,
    damage: float,
    budget: float,
) -> list[str]:
    said: list[str] = []
    waits = {role.name: role for role in plain.replayed.timeline().roles}
    own = {name: time.own_s for name, time in waits.items()}
    slow, fast = max(own, key=lambda n: own[n]), min(own, key=lambda n: own[n])
    if own[slow] > 1.02 * own[fast]:
        said.append(
            f"with even shares {slow} computes {_ms(own[slow])} a step and {fast} {_ms(own[fast])}, so "
            f"that {fast} waits"
        )
    else:
        said.append("with even shares all ranks compute for about as long")
    job = found.job
    counts = job.counts
    if batch == "free":
        shares = ", ".join(f"{job.samples[n]} for each of {counts[n]} {n}" for n in job.devices)
        said.append(f"shares follow speed, which changes no result: {shares}")
    said += _lowered_words(search, found, batch, damage, budget)
    said += _bits_words(search, found, bits)
    estimated = [d for d in search.counts if search.profile.devices[d].estimated]
    if estimated:
        said.append(f"the times of {', '.join(estimated)} are estimated from datasheets, not measured")
    gain = plain.step_s / found.step_s
    said.append(
        f"a step is predicted to take {_ms(found.step_s)} in place of plain DDP's {_ms(plain.step_s)}: "
        f"{gain:.3g} times as fast"
        if gain >= 1.005
        else "nothing here makes a step faster than plain DDP's"
    )
    return said


def _lowered_words(
    search: PlanSearch, found: JobCandidate, batch: str, damage: float, budget: float
) -> list[str]:
    lower = {name: lowered(chosen) for name, chosen in found.chosen.items()}
    if any(lower.values()):
        words = "; ".join(
            f"{name} lowers {len(own)} of {len(found.chosen[name])} operators "
            f"({', '.join(sorted(set(own.values())))})"
            for name, own in lower.items()
            if own
        )
        allowed = f" of {budget:.3g} allowed" if batch == "free" else ""
        said = [f"{words}: damage {damage:.3g}{allowed}"]
        for name, own in lower.items():
            device = found.job.devices[name]
            if own and not search.tradeoffs.fits(device, found.job.samples[name], {}):
                said.append(f"{name} would not fit its memory with nothing lowered")
        return said
    if len(_unprobed(search, found)) == len(search.counts):
        return ["nothing is lowered: no lower precision was probed; see `trimtab probe --precision`"]
    if batch == "free" and not budget:
        return ["nothing is lowered: no damage is allowed"]
    if batch == "free":
        return [f"nothing is lowered: that would gain less than {GAIN - 1:.0%} beyond the shares"]
    return [f"nothing is lowered: no rank is slow, or lowering it would gain less than {GAIN - 1:.0%}"]


def _unprobed(search: PlanSearch, found: JobCandidate) -> list[str]:
    """Device classes on which no operator can be lowered."""
    return [
        device
        for device in search.counts
        if not search.tradeoffs.menu(device, found.job.samples[found.job.of(device)[0]]).options
    ]


def _bits_words(search: PlanSearch, found: JobCandidate, bits: Bits) -> list[str]:
    if bits == "adaptive":
        return [f"bits follow the gradients while training; predicted at {found.bits}"]
    if bits != "auto" or len(search.devices) == 1:
        return []
    if found.bits is not None:
        return [f"gradients travel in {found.bits} bits, with which the step is fastest"]
    if not search.bits_measured():
        return ["gradients travel as they are: the codec was not measured on every device class"]
    return [f"gradients travel as they are: fewer bits would gain less than {GAIN - 1:.0%}"]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
