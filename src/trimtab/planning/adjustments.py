"""What a plan's adjustments are worth: the step with each alone, without each, without some ranks; time and damage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trimtab.errors import TrimtabError
from trimtab.planning.job_search import FEW_CLASSES
from trimtab.planning.plan_search import GAIN, Bits, JobCandidate, PlanSearch
from trimtab.planning.precision.damage_curve import CLOSE, budgets, pareto
from trimtab.planning.precision.options import Chosen, lowered
from trimtab.planning.reasons import Adjustment
from trimtab.planning.roles import RoleLayout
from trimtab.predict.collectives import Route

SKIPPED = (
    f"with more than {FEW_CLASSES} device classes neither time against damage nor the step without some ranks is "
    "computed"
)


@dataclass(frozen=True, kw_only=True)
class Worth:
    """A plan's job, and what each part of it is worth."""

    chosen: JobCandidate
    """As found, or a better one that turned up while it was taken apart: no slower than any adjustment alone, and
    without adjustments that it is faster without."""

    adjustments: tuple[Adjustment, ...]
    tradeoff: tuple[tuple[float, float], ...]
    """(step, damage), from no damage to the fastest step."""

    skipped: str = ""
    """What was not computed, and why."""


def weigh(
    search: PlanSearch,
    plain: JobCandidate,
    chosen: JobCandidate,
    batch: Literal["fixed", "free"],
    bits: Sequence[Bits],
    budget: float,
) -> Worth:
    """Take a plan's job apart.

    Args:
        bits: what the search chose among.
        budget: damage allowed with free shares.
    """
    alone = singles(search, plain, batch, budget)
    for single in alone.values():
        if single.step_s < chosen.step_s and ("adaptive" if single.adaptive else single.bits) in bits:
            chosen = single
    few = len(search.counts) <= FEW_CLASSES
    curve = _curve(search, chosen, batch) if few else []
    for point in curve if batch == "free" else ():
        worth_it = point.damage <= budget and chosen.step_s >= GAIN * point.step_s
        dominates = point.damage <= chosen.damage and point.step_s < chosen.step_s * (1 - CLOSE)
        if worth_it or dominates:
            chosen = point
    for _ in range(3):  # at most shares, precision and bits can be dropped
        less = [
            one
            for name, one in without(search, plain, chosen).items()
            if search.fits(one) and (name != "bits" or None in bits) and one.step_s < chosen.step_s
        ]
        if not less:
            break
        chosen = min(less, key=lambda one: one.step_s)
    return Worth(
        chosen=chosen,
        adjustments=(
            *_adjustments(search, plain, chosen, alone),
            *_setting_adjustments(search, plain, chosen),
            *(_ranks_adjustments(search, chosen, batch, budget) if few else ()),
        ),
        tradeoff=pareto(
            (chosen.step_s, search.damage_of(chosen)), [(point.step_s, point.damage) for point in curve]
        )
        if curve
        else (),
        skipped="" if few else SKIPPED,
    )


def singles(
    search: PlanSearch,
    plain: JobCandidate,
    batch: Literal["fixed", "free"],
    budget: float,
) -> dict[str, JobCandidate]:
    """The best job with each adjustment alone; plain DDP where the adjustment gains too little to be made."""
    uncompressed = search.uncompressed
    found: dict[str, list[JobCandidate | None]] = {}
    if batch == "fixed":
        found["precision"] = [search.tried.get(None) or search.fixed(uncompressed)]
    else:
        if len(search.devices) > 1:
            found["shares"] = [search.shared_only or search.one_pass(uncompressed, 0.0)]
        found["precision"] = [search.one_pass(uncompressed, budget, evenly=True)]
    if any(count is not None for count in search.tried):
        found["bits"] = [search.even(one.setting) for count, one in search.tried.items() if count is not None]
    alone: dict[str, JobCandidate] = {}
    for name, candidates in found.items():
        gain = 1.0 if name == "shares" else GAIN  # shares change nothing about the result
        fitting = [one for one in (plain, *candidates) if one is not None and search.fits(one)]
        if fitting:
            best = min(fitting, key=lambda one: one.step_s)
            alone[name] = best if fitting[0] is not plain or plain.step_s >= gain * best.step_s else plain
    return alone


def without(search: PlanSearch, plain: JobCandidate, chosen: JobCandidate) -> dict[str, JobCandidate]:
    """The job without each of its adjustments, all else the same."""
    jobs: dict[str, JobCandidate] = {}
    if chosen.job.samples != plain.job.samples:
        precisions = {
            role: chosen.chosen[chosen.job.of(device)[0]] for role, device in plain.job.devices.items()
        }
        jobs["shares"] = _candidate(search, plain.job, precisions, chosen)
    if any(map(lowered, chosen.chosen.values())):
        jobs["precision"] = _candidate(search, chosen.job, {role: {} for role in chosen.job.devices}, chosen)
    if chosen.bits is not None:
        sharding = search.uncompressed.sharding
        setting = replace(chosen.setting, bits=None, layer_bits={}, route=None, sharding=sharding)
        jobs["bits"] = search.with_setting(chosen, setting)
    return jobs


def _candidate(
    search: PlanSearch, job: RoleLayout, chosen: Mapping[str, Chosen], like: JobCandidate
) -> JobCandidate:
    candidate = search.candidate(job, dict(chosen), 0.0, like.setting)
    return replace(candidate, damage=search.damage_of(candidate))


def _adjustments(
    search: PlanSearch,
    plain: JobCandidate,
    chosen: JobCandidate,
    alone: Mapping[str, JobCandidate],
) -> list[Adjustment]:
    """Shares, precision and bits, and the precision of each role that is lowered."""
    less = without(search, plain, chosen)
    made = [
        Adjustment(
            name=name,
            words=_words(search, chosen, name) if name in less else "",
            without_s=less[name].step_s if name in less and search.fits(less[name]) else None,
            alone_s=alone[name].step_s if name in alone else None,
        )
        for name in dict.fromkeys(("shares", "precision", "bits", *alone))
        if name in less or name in alone
    ]
    low = {role: lowered(own) for role, own in chosen.chosen.items() if lowered(own)}
    for role, own in list(low.items())[:FEW_CLASSES]:
        raised = _candidate(search, chosen.job, {**chosen.chosen, role: {}}, chosen)
        precisions = ", ".join(sorted(set(own.values())))
        made.append(
            Adjustment(
                name=f"precision of {role}",
                words=f"{label(_ranks_of(chosen.job, role), chosen.job.devices[role])}: {len(own)} of "
                f"{len(chosen.chosen[role])} operators in {precisions}",
                without_s=raised.step_s if search.fits(raised) else None,
            )
        )
    return made


def _words(search: PlanSearch, chosen: JobCandidate, name: str) -> str:
    """What the plan does, where it is not told by role."""
    job = chosen.job
    if name == "shares":
        shares = [
            f"{job.samples[role] * search.accumulate} for each of {job.counts[role]} {role}"
            for role in job.devices
        ]
        more = f" and {len(shares) - 8} other roles" if len(shares) > 8 else ""
        return f"shares follow speed, which does not change the result: {', '.join(shares[:8])}{more}"
    if name == "bits" and chosen.adaptive:
        return f"bits adapt to the gradients during training; predicted with {chosen.bits}"
    return f"gradients are sent in {chosen.bits} bits" if name == "bits" else ""


def _setting_adjustments(search: PlanSearch, plain: JobCandidate, chosen: JobCandidate) -> list[Adjustment]:
    """What the ranks of a plan do alike, beside bits."""
    setting = chosen.setting
    made: list[Adjustment] = []

    def add(name: str, words: str, *, alone_s: float | None = None, **changed: Any) -> None:
        without_s = search.with_setting(chosen, replace(setting, **changed)).step_s if changed else None
        made.append(Adjustment(name=name, words=words, without_s=without_s, alone_s=alone_s))

    if setting.accumulate > 1:
        words = (
            f"memory does not hold the batch: a step has {setting.accumulate} micro-batches of {search.total}"
        )
        add("accumulate", words)
    if setting.route is not None and setting.route != Route():
        add("route", f"compressed gradients are reduced by the route {setting.route.name}", route=Route())
    if setting.sharding is not None and setting.sharding.weight_bits is not None:
        words = f"weights are gathered in {setting.sharding.weight_bits} bits"
        add("weight_bits", words, sharding=replace(setting.sharding, weight_bits=None))
    if setting.sharding is not None and setting.sharding.hybrid:
        over_all = search.with_setting(
            chosen, replace(setting, sharding=replace(setting.sharding, hybrid=False))
        )
        made.append(
            Adjustment(
                name="hsdp",
                words="weights are gathered inside hosts",
                without_s=over_all.step_s if search.fits(over_all) else None,
            )
        )
    if setting.bucket_cap_mb is not None:
        alone = search.with_setting(plain, replace(plain.setting, bucket_cap_mb=setting.bucket_cap_mb))
        words = f"DDP's buckets have {setting.bucket_cap_mb:g} MB"
        add("buckets", words, alone_s=min(alone.step_s, plain.step_s), bucket_cap_mb=None)
    if setting.layer_bits:
        few = sum(1 for bits in setting.bits_of(search.workload).values() if bits == setting.bits)
        raised, count = (
            ", ".join(sorted({f"{bits}" for bits in setting.layer_bits.values()})),
            len(setting.layer_bits),
        )
        add(
            "layer_bits",
            f"{count} of {count + few} parameters are sent in {raised} bits, because there is time",
        )
    return made


# Without some ranks


def _ranks_adjustments(
    search: PlanSearch, chosen: JobCandidate, batch: str, budget: float
) -> list[Adjustment]:
    """The step without the ranks of each device class on each link, if there are few such groups."""
    groups: dict[tuple[str, str | None], list[int]] = {}
    rank = 0
    for _, host in search.cluster.machines():
        for device, count in host.devices.items():
            groups.setdefault((device, host.link), []).extend(range(rank, rank + count))
            rank += count
    if not 1 < len(groups) <= FEW_CLASSES:
        return []
    made = []
    for (device, link), ranks in groups.items():
        step_s = _without_ranks(search, chosen, device, link, batch, budget)
        if step_s is not None:
            made.append(Adjustment(name=label(ranks, device), words="", without_s=step_s, ranks=True))
    return made


def _without_ranks(
    search: PlanSearch, chosen: JobCandidate, device: str, link: str | None, batch: str, budget: float
) -> float | None:
    """The step of the same batch on the other ranks, found in one pass.

    None if it does not fit them, or nothing is known about the link between them.
    """
    hosts = [
        replace(host, devices=left) if host.link == link else host
        for host in search.cluster.hosts
        if (left := {name: n for name, n in host.devices.items() if name != device or host.link != link})
    ]
    others = search.on(replace(search.cluster, hosts=tuple(hosts)))
    setting = chosen.setting if len(others.devices) > 1 else others.uncompressed
    job: JobCandidate | None
    try:
        setting = others.routed(setting)
        if batch == "free":
            job = others.one_pass(setting, max(budget, chosen.damage))
        else:
            even = others.even(setting)
            by_role = {role: chosen.chosen[chosen.job.of(own)[0]] for role, own in even.job.devices.items()}
            job = _candidate(others, even.job, by_role, even)
    except TrimtabError:  # of one host whose ranks' own link was not measured
        return None
    return job.step_s if job is not None and others.fits(job) else None


def label(ranks: Sequence[int], device: str) -> str:
    """Ranks of a device class in words: "rank 3 (T4)", "ranks 0-3 (T4)", "5 ranks (T4)"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} ({device})"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]} ({device})"
    return f"{len(ranks)} ranks ({device})"


def _ranks_of(job: RoleLayout, role: str) -> list[int]:
    ranks: list[int] = []
    first = 0
    for name, count in job.ranks:
        if name == role:
            ranks += range(first, first + count)
        first += count
    return ranks


# Time against damage


def _curve(search: PlanSearch, chosen: JobCandidate, batch: str) -> list[JobCandidate]:
    """What other damage budgets would bring, each found in one pass of the search."""
    most = search.largest_damage(chosen.job, search.counts)
    evenly = batch == "fixed"
    points = (search.one_pass(chosen.setting, each, evenly=evenly, like=chosen) for each in budgets(most))
    return [replace(point, damage=search.damage_of(point)) for point in points if point is not None]
