"""FSDP2 where a whole copy of the model does not fit a rank. Pure functions.

FSDP2 sends the weights twice a step, so it is chosen only where DDP does not fit at any shares, precisions and
micro-batches. Shares, precisions and bits are then searched for as under DDP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from trimtab.errors import TrimtabError
from trimtab.planning.plan_search import Bits, JobCandidate, PlanSearch
from trimtab.planning.precision.options import DoesNotFitError
from trimtab.planning.reasons import Adjustment
from trimtab.predict.collectives import Placement
from trimtab.predict.fsdp_units import ALL_RANKS, Sharding
from trimtab.predict.replayed_job import needed_bytes
from trimtab.predict.step_setting import StepSetting

MUCH_FASTER = 1.25
"""FSDP2 is advised where it makes the step shorter by this factor: probes do not measure torch's own work for it."""


def fsdp_job(
    search: Callable[[Sharding], PlanSearch],
    too_large: DoesNotFitError,
    batch: Literal["fixed", "free"],
    bits: tuple[Bits, ...],
    budget: float,
) -> tuple[PlanSearch, JobCandidate, JobCandidate]:
    """The fastest job that fits under FSDP2, over all ranks or inside hosts (HSDP): its search, the plain one, it.

    Raises:
        DoesNotFitError: it does not fit under FSDP2 either.
    """
    over_all = search(ALL_RANKS)
    placement = Placement.on(over_all.cluster)
    world = placement.world
    if world == 1 or (batch == "fixed" and over_all.total % world):
        raise too_large
    hybrid = placement.two_levels and placement.equal and placement.hosts > 1
    jobs = []
    for each in (over_all, *((search(Sharding(hybrid=True)),) if hybrid else ())):
        plain = each.plain()
        try:
            jobs.append((each, plain, each.choose(batch, bits, budget, plain)))
        except DoesNotFitError:
            continue
    if not jobs:
        least = max(over_all.tradeoffs.least_peak(device, 1) for device in over_all.counts)
        raise DoesNotFitError(
            f"{too_large}; nor does it fit with FSDP2 over {world} ranks, where a rank with one sample needs "
            f"{_gib(least)}"
        ) from too_large
    return min(jobs, key=lambda job: job[2].step_s)


def fsdp_advice(
    search: PlanSearch, sharded: Callable[[Sharding], PlanSearch], chosen: JobCandidate
) -> str | None:
    """In words, what the planned job would take under FSDP2 where that is much shorter; else None.

    It is advice only: the script must wrap the model otherwise for it, and a copy on every rank fits. One prediction
    each of exact and of compressed gradients, with the planned shares and precisions.
    """
    if search.accumulate > 1:
        return None
    try:
        over_all = sharded(ALL_RANKS)
        settings = [over_all.uncompressed]
        if chosen.bits is not None and (measured := over_all.bits_measured()):
            bits = min((b for b in measured if b >= chosen.bits), default=max(measured))
            settings.append(over_all.routed(replace(over_all.uncompressed, bits=bits)))
        jobs = [over_all.candidate(chosen.job, chosen.chosen, chosen.damage, setting) for setting in settings]
        best = min(filter(over_all.fits, jobs), key=lambda job: job.step_s, default=None)
    except TrimtabError:  # its collectives were not measured
        return None
    if best is None or chosen.step_s < MUCH_FASTER * best.step_s:
        return None
    return (
        f"the same shares and precisions with FSDP2 over {len(over_all.devices)} ranks, gradients "
        f"{'sent exactly' if best.bits is None else f'in {best.bits} bits'}, are predicted to take "
        f"{best.step_s * 1e3:.3g} ms a step instead of {chosen.step_s * 1e3:.3g} ms: for that the script wraps the "
        "model with torch.distributed.fsdp.fully_shard instead of DDP, without this plan"
    )


def wrapper_adjustment(search: PlanSearch, plain: JobCandidate, chosen: JobCandidate) -> Adjustment:
    """What FSDP2 is for, and the step with it alone."""
    assert chosen.setting.sharding is not None
    whole = {
        role: needed_bytes(
            search.measured.operators.at(chosen.job.samples[role]),
            {},
            search.cluster.devices[device].kind,
            len(search.devices),
            StepSetting(),
        )
        for role, device in chosen.job.devices.items()
    }
    limits = search.tradeoffs.limits

    def over(role: str) -> float:
        return whole[role] / (limits[chosen.job.devices[role]] or float("inf"))

    worst = max(chosen.job.devices, key=over)
    device, hybrid = chosen.job.devices[worst], chosen.setting.sharding.hybrid
    how = "HSDP shards it inside each host over" if hybrid else "FSDP2 shards it over"
    return Adjustment(
        name="wrapper",
        words=f"a whole copy with its samples needs {_gib(whole[worst])} and {device} has {_gib(limits[device] or 0)}: "
        f"{how} {chosen.setting.sharding.ways(Placement.on(search.cluster))} ranks: "
        f"{_gib(chosen.replayed.peak(worst))}",
        alone_s=plain.step_s if search.fits(plain) else None,
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3g} GiB"
