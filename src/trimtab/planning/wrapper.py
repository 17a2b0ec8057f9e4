"""DDP or FSDP2: what to wrap a model in when a whole copy does not fit a rank. Pure functions.

FSDP2 sends the weights twice a step, so it is chosen only where DDP does not fit at any shares, precisions and
micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trimtab.cluster import Cluster
from trimtab.errors import TrimtabError
from trimtab.planning.job_search import GAIN
from trimtab.planning.plan import PLAN_VERSION, Plan, Predicted, Role
from trimtab.planning.plan_search import PlanSearch
from trimtab.planning.precision.options import DoesNotFitError
from trimtab.planning.roles import RoleLayout, even, layout
from trimtab.planning.shares.batch import share_batch
from trimtab.predict.collectives import Placement
from trimtab.predict.fsdp import predict_fsdp
from trimtab.predict.fsdp_units import ALL_RANKS, Sharding
from trimtab.predict.memory.sharded_peak import sharded_memory
from trimtab.predict.operators.measured import Measured
from trimtab.predict.replay.timeline import Timeline, bottleneck
from trimtab.predict.replayed_job import RoleSetting, by_roles, needed_bytes
from trimtab.predict.step import JobSetting, RankSetting
from trimtab.predict.step_setting import StepSetting
from trimtab.workload import Workload

Limits = Mapping[str, int | None]
"""By device class: bytes of memory; None for no limit."""


@dataclass(frozen=True, kw_only=True)
class FsdpCandidate:
    """A sharded job that could be run."""

    job: RoleLayout
    sharding: Sharding
    ways: int
    """Ranks that share one copy of the model."""

    bits: int | None
    timeline: Timeline
    peaks: dict[str, int]
    """By role: memory that a rank needs."""

    @property
    def step_s(self) -> float:
        return self.timeline.step_s


def ddp_fits(workload: Workload, cluster: Cluster, job: RoleLayout, limits: Limits) -> bool:
    """Whether every rank has memory for a whole copy and its share, with nothing lowered or compressed."""
    return not _too_large(ddp_peaks(workload, cluster, job), job, limits)


def ddp_peaks(workload: Workload, cluster: Cluster, job: RoleLayout) -> dict[str, int]:
    """By role: the memory that a rank needs under plain DDP."""
    return {
        role: needed_bytes(
            workload.at_batch(job.samples[role]),
            {},
            cluster.devices[device].kind,
            cluster.world_size,
            StepSetting(),
        )
        for role, device in job.devices.items()
    }


def fsdp_candidate(
    measured: Measured,
    cluster: Cluster,
    job: RoleLayout,
    limits: Limits,
    *,
    sharding: Sharding = ALL_RANKS,
    bits: int | None = None,
) -> FsdpCandidate | None:
    """The job under FSDP2 or HSDP, with its predicted step and memory; None if it does not fit every rank.

    Raises:
        TrimtabError: something was not measured, or the hosts do not allow this sharding.
    """
    ways = sharding.ways(Placement.on(cluster))
    peaks = {
        role: sharded_peak(
            measured.at(job.samples[role]), cluster.devices[device].kind, ways, bits, sharding.keep
        )
        for role, device in job.devices.items()
    }
    if _too_large(peaks, job, limits):
        return None
    roles = {
        role: RoleSetting(device=device, samples=job.samples[role], precisions={})
        for role, device in job.devices.items()
    }
    by_role, profile = by_roles(cluster, roles, job.ranks)
    ranks = {role: RankSetting(samples=own.samples, precisions={}) for role, own in roles.items()}
    timeline = predict_fsdp(measured.on(profile), by_role, JobSetting(ranks=ranks, bits=bits), sharding)
    return FsdpCandidate(job=job, sharding=sharding, ways=ways, bits=bits, timeline=timeline, peaks=peaks)


def sharded_peak(
    workload: Workload, kind: Literal["cpu", "cuda"], ways: int, bits: int | None, keep: bool = False
) -> int:
    """Memory that a device needs for a sharded step; see `needed_bytes`."""
    needed = sharded_memory(workload, ways=ways, kind=kind, bits=bits, keep=keep)
    return needed.reserved if kind == "cuda" else needed.peak


def best_fsdp(
    search: PlanSearch, batch: Literal["fixed", "free"], bits: Sequence[int | Literal["adaptive"] | None]
) -> FsdpCandidate | None:
    """The fastest sharded job that fits: over all ranks or inside hosts, in these bits where that gains.

    Bits that adapt are not offered under FSDP2, so they count as uncompressed.
    """
    placement = Placement.on(search.cluster)
    shardings = [ALL_RANKS]
    if placement.two_levels and placement.hosts > 1:
        shardings.append(Sharding(hybrid=True))
    best: FsdpCandidate | None = None
    counts = dict.fromkeys(count if isinstance(count, int) else None for count in bits)
    for count in sorted(counts, key=lambda count: -(count or 32)):
        for sharding in shardings:
            for job in _jobs(search, batch, sharding.ways(placement), count):
                candidate = fsdp_candidate(
                    search.measured.operators,
                    search.cluster,
                    job,
                    search.tradeoffs.limits,
                    sharding=sharding,
                    bits=count,
                )
                gain = GAIN if best is not None and best.bits != count else 1.0
                if candidate and (best is None or best.step_s > gain * candidate.step_s):
                    best = candidate
    return best


def _jobs(search: PlanSearch, batch: str, ways: int, bits: int | None) -> list[RoleLayout]:
    """Even shares; and if shares are free, those that follow speed as far as memory allows."""
    devices, total = search.devices, search.total
    jobs = [layout(devices, even(devices, total))]
    if batch == "fixed":
        return jobs
    measured, each = search.measured.operators, max(1, total // len(devices))
    per_sample, fixed, most = {}, {}, {}
    for device in search.counts:
        kind = search.cluster.devices[device].kind
        low, high = (measured.mapper(device, kind, samples).total_s for samples in (each, 2 * each))
        per_sample[device] = max((high - low) / each, 1e-9)
        fixed[device] = max(0.0, low - each * per_sample[device])
        limit = search.tradeoffs.limits[device]
        most[device] = None if limit is None else _most(measured, kind, ways, bits, limit, total)
    try:
        shares = share_batch(
            total,
            [per_sample[device] for device in devices],
            fixed=[fixed[device] for device in devices],
            most=[most[device] for device in devices],
        )
    except TrimtabError:
        return jobs  # there is not enough memory for the batch
    by_device: dict[str, list[int]] = {}
    for device, samples in zip(devices, shares, strict=True):
        by_device.setdefault(device, []).append(samples)
    jobs.append(layout(devices, {d: tuple(sorted(own, reverse=True)) for d, own in by_device.items()}))
    return jobs


def _most(
    measured: Measured, kind: Literal["cpu", "cuda"], ways: int, bits: int | None, limit: int, total: int
) -> int:
    """The most samples that fit, by bisection."""
    low, high = 0, total + 1
    while high - low > 1:
        middle = (low + high) // 2
        if sharded_peak(measured.at(middle), kind, ways, bits) <= limit:
            low = middle
        else:
            high = middle
    return low


def fsdp_plan(
    search: PlanSearch,
    plain_step_s: float,
    too_large: DoesNotFitError,
    *,
    model: str,
    trimtab: str,
    batch: Literal["fixed", "free"],
    bits: Sequence[int | Literal["adaptive"] | None],
) -> Plan:
    """The plan for a job that does not fit under DDP.

    Raises:
        DoesNotFitError: it does not fit under FSDP2 either.
    """
    world = len(search.devices)
    if world == 1 or (batch == "fixed" and search.total % world):
        raise too_large
    chosen = best_fsdp(search, batch, bits)
    if chosen is None:
        least = {
            device: sharded_peak(
                search.measured.operators.at(1), search.cluster.devices[device].kind, world, None
            )
            for device in search.counts
        }
        raise DoesNotFitError(
            f"{too_large}; nor does it fit with FSDP2 over {world} ranks, where a rank with one sample needs "
            f"{max(least.values()) / 2**30:.3g} GiB"
        ) from too_large
    return Plan(
        version=PLAN_VERSION,
        trimtab=trimtab,
        model=model,
        batch=batch,
        bits=chosen.bits,
        roles=_roles(search, chosen),
        ranks=chosen.job.ranks,
        predicted=Predicted(step_s=chosen.step_s, plain_step_s=plain_step_s, damage=0.0, uniform_damage=0.0),
        wrapper="fsdp",
        shard_ranks=chosen.ways if chosen.sharding.hybrid else None,
        reasons=tuple(_reasons(search, chosen)),
    )


def _roles(search: PlanSearch, candidate: FsdpCandidate) -> dict[str, Role]:
    times = {role.name: role for role in candidate.timeline.roles}
    measured, roles = search.measured.operators, {}
    for name, device in candidate.job.devices.items():
        samples, kind = candidate.job.samples[name], search.cluster.devices[device].kind
        own, more = (measured.mapper(device, kind, count).total_s for count in (samples, samples + 1))
        compute = times[name].compute_s
        after = max(0.0, times[name].own_s - own)
        peak = candidate.peaks[name]
        grown = sharded_peak(measured.at(samples + 1), kind, candidate.ways, candidate.bits)
        roles[name] = Role(
            device=device,
            kind=kind,
            samples=samples,
            precisions={},
            compute_s=compute,
            peak_bytes=peak,
            memory_bytes=search.tradeoffs.limits[device],
            fixed_s=min(max(0.0, own - samples * (more - own)) + after, compute),
            after_s=min(after, compute),
            bytes_per_sample=float(max(0, grown - peak)),
        )
    return roles


def _reasons(search: PlanSearch, chosen: FsdpCandidate) -> list[str]:
    whole = ddp_peaks(search.workload, search.cluster, chosen.job)
    limits = search.tradeoffs.limits

    def over(role: str) -> float:
        return whole[role] / (limits[chosen.job.devices[role]] or float("inf"))

    worst = max(chosen.job.devices, key=over)
    device = chosen.job.devices[worst]
    how = "HSDP shards it inside each host over" if chosen.sharding.hybrid else "FSDP2 shards it over"
    shares = ", ".join(
        f"{chosen.job.samples[role]} for each of {count} {role}" for role, count in chosen.job.counts.items()
    )
    sent = f"gradients are sent in {chosen.bits} bits" if chosen.bits else "gradients are sent uncompressed"
    return [
        f"a whole copy with its samples needs {_gib(whole[worst])} and {device} has {_gib(limits[device] or 0)}: {how} "
        f"{chosen.ways} ranks: {_gib(chosen.peaks[worst])}",
        f"samples: {shares}",
        sent,
        f"a step is predicted to take {chosen.step_s * 1e3:.3g} ms, most of it in "
        f"{bottleneck(chosen.timeline, advice=False)}",
    ]


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3g} GiB"


def _too_large(peaks: Mapping[str, int], job: RoleLayout, limits: Limits) -> bool:
    return any(peak > (limits[job.devices[role]] or peak) for role, peak in peaks.items())
