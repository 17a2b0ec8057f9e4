"""Makes a `Plan` from a cluster's profile, a workload and damages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import fsum
from typing import Any, Literal

from trimtab.cluster import Cluster
from trimtab.errors import TrimtabError
from trimtab.planning.adjustments import weigh
from trimtab.planning.local_offer import in_words, local_offer
from trimtab.planning.local_steps import MAX_PENALTY
from trimtab.planning.plan import PLAN_VERSION, Plan, Predicted, Role
from trimtab.planning.plan_search import BUDGET, JobCandidate, PlanSearch
from trimtab.planning.precision.options import DoesNotFitError, lowered
from trimtab.planning.precision.plan_tradeoffs import choices_of
from trimtab.planning.reasons import Adjustment, reasons_of
from trimtab.planning.tensor.plan_layout import LayoutOption, with_layout
from trimtab.planning.wrapper import fsdp_advice, fsdp_job, wrapper_adjustment
from trimtab.precision_names import OWN
from trimtab.predict.collectives import Placement
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
    layout: LayoutOption = "auto",
    own_buckets: bool = False,
    max_penalty: float = MAX_PENALTY,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Decide what every rank does. Pure: the same input gives the same plan on any machine.

    Args:
        cluster: with its profile.
        damages: by operator and precision, for a rank that computes the whole batch; empty if they are not known.
        model: fingerprint of the model.
        batch_size: of all ranks together; it does not change.
        batch: "fixed" gives every rank the same share and lowers only slow ranks; "free" lets shares follow speed,
            and lowers operators where that gains more.
        budget: damage allowed with "free".
        bits: of gradients; "auto" takes the fastest of uncompressed, the measured ones of `TRIED` and bits that adapt.
        layout: "data" gives every rank a copy of the model, a number makes tensor groups of so many ranks; "auto"
            does that where it is predicted to be faster, or where a copy does not fit.
        own_buckets: DDP exists already, so its buckets are the workload's.
        max_penalty: of the local steps that the plan mentions where they would be much faster: the expected relative
            increase of the loss limits their rounds.

    Raises:
        TrimtabError: something was not measured or does not fit; the message says what to do.
    """
    search = PlanSearch(cluster, workload, damages, batch_size)
    return with_layout(
        search,
        lambda: _data_parallel(
            cluster,
            workload,
            damages,
            model,
            trimtab,
            batch_size,
            batch,
            budget,
            bits,
            own_buckets,
            max_penalty,
            progress,
        ),
        layout,
        model=model,
        trimtab=trimtab,
        batch=batch,
        bits=[each for each in _bits_to_try(search, bits) if bits == "adaptive" or each != "adaptive"],
        budget=budget,
    )


def _data_parallel(
    cluster: Cluster,
    workload: Workload,
    damages: Mapping[str, Mapping[str, float]],
    model: str,
    trimtab: str,
    batch_size: int,
    batch: Literal["fixed", "free"],
    budget: float,
    bits: Bits,
    own_buckets: bool,
    max_penalty: float,
    progress: Callable[[int, int], None],
) -> Plan:
    """The plan with a copy of the model on every rank, or in FSDP2 where that does not fit."""

    def searching(**options: Any) -> PlanSearch:
        return PlanSearch(
            cluster, workload, damages, batch_size, own_buckets=own_buckets, progress=progress, **options
        )

    wrapper: Adjustment | None = None
    plain_ddp_s: float | None = None
    for accumulate in _accumulations(cluster.world_size, batch_size, batch):
        search = searching(accumulate=accumulate)
        plain = search.plain()
        plain_ddp_s = plain_ddp_s or plain.step_s
        try:
            to_try = _bits_to_try(search, bits)
            chosen = search.choose(batch, to_try, budget, plain)
            break
        except DoesNotFitError as error:
            too_large = error
    else:
        if accumulate == 1:
            too_large = DoesNotFitError(
                f"{too_large}; a batch size with more divisors could be split into micro-batches"
            )
        bits = None if bits == "adaptive" else bits  # bits that adapt are not offered under FSDP2
        to_try = tuple(each for each in _bits_to_try(search, bits) if each != "adaptive")
        search, plain, chosen = fsdp_job(
            lambda sharding: searching(sharding=sharding), too_large, batch, to_try, budget
        )
    worth = weigh(search, plain, chosen, batch, to_try, budget)
    chosen, adjustments = worth.chosen, worth.adjustments
    sharding = chosen.setting.sharding
    if sharding is not None:
        wrapper = wrapper_adjustment(search, plain, chosen)
    damage = search.damage_of(chosen)
    uniform = search.uniform_damage()
    reasons = reasons_of(search, plain, chosen, adjustments, batch, bits, damage, budget)
    if worth.skipped:
        reasons.insert(-1, worth.skipped)
    rounds = local_offer(search, chosen, max_penalty)
    if rounds is not None:
        reasons.insert(-1, in_words(rounds))
    if sharding is None and len(search.devices) > 1 and not own_buckets:
        advice = fsdp_advice(search, lambda each: searching(sharding=each), chosen)
        if advice is not None:
            reasons.insert(-1, advice)
    if wrapper is not None:
        reasons.insert(0, wrapper.words)
        adjustments = (wrapper, *adjustments)
    return Plan(
        version=PLAN_VERSION,
        trimtab=trimtab,
        model=model,
        batch=batch,
        bits="adaptive" if chosen.adaptive else chosen.bits,
        roles=_roles(search, chosen),
        ranks=chosen.job.ranks,
        predicted=Predicted(
            step_s=chosen.step_s,
            plain_step_s=plain.step_s if sharding is None else plain_ddp_s or 0.0,
            damage=damage,
            uniform_damage=uniform,
            alone={one.name: one.alone_s for one in adjustments if one.alone_s is not None},
            without={one.name: one.without_s for one in adjustments if one.without_s is not None},
            tradeoff=worth.tradeoff,
        ),
        budget=budget if batch == "free" else 0.0,
        wrapper="ddp" if sharding is None else "fsdp",
        shard_ranks=None if sharding is None or not sharding.hybrid else sharding.ways(Placement.on(cluster)),
        weight_bits=None if sharding is None else sharding.weight_bits,
        accumulate=search.accumulate,
        layer_bits=dict(chosen.setting.layer_bits),
        route=chosen.setting.route,
        bucket_cap_mb=chosen.setting.bucket_cap_mb,
        local_steps=rounds,
        reasons=tuple(reasons),
    )


def _bits_to_try(search: PlanSearch, bits: Bits) -> tuple[int | Literal["adaptive"] | None, ...]:
    measured = search.bits_measured()
    if len(search.devices) == 1:
        return (None,)
    if bits == "auto":
        return (None, *(b for b in TRIED if b in measured), *(("adaptive",) if measured else ()))
    if bits == "adaptive":
        if not measured:
            raise TrimtabError(
                "the codec was not measured on every device class, so the gain of adaptive bits cannot be predicted; "
                "run `trimtab probe --bits 4` there, or plan with --bits none"
            )
        return ("adaptive",)
    return (bits,)


def _accumulations(world: int, batch_size: int, batch: str) -> list[int]:
    """Numbers of micro-batches to try, fewest first: each rank has samples in each, with fixed shares the same."""
    unit = world if batch == "fixed" else 1
    return [1] + [
        count
        for count in range(2, batch_size // world + 1)
        if batch_size % count == 0 and batch_size // count % unit == 0
    ]


def _roles(search: PlanSearch, candidate: JobCandidate) -> dict[str, Role]:
    job, tradeoffs = candidate.job, search.tradeoffs
    tradeoffs.setting = candidate.setting
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
            samples=samples * search.accumulate,
            precisions=lowered(precisions),
            compute_s=times[name].compute_s,
            peak_bytes=peak,
            memory_bytes=tradeoffs.limits[device],
            fixed_s=min(fixed, times[name].compute_s),
            after_s=min(after, times[name].compute_s),
            bytes_per_sample=max(0, tradeoffs.peak(device, samples + 1, picked) - peak) / search.accumulate,
            choices=choices_of(menu.options, picked),
        )
    return roles
