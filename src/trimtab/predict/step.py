"""Time and memory of one step of a job: a workload on a cluster with given settings."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from trimtab.cluster.profile import LOCAL
from trimtab.errors import TrimtabError
from trimtab.predict.collectives import BLOCK, COLLECTIVES, Collective, Placement, Route
from trimtab.predict.links import SHARED_MEMORY, Fit, JobLinks, nominal
from trimtab.predict.memory.step_peak import Memory, step_memory
from trimtab.predict.operators.estimate import ADAM_BYTES
from trimtab.predict.precision_patterns import matched
from trimtab.predict.replay.build import (
    ACCUMULATED_BYTES,
    compressed_buckets,
    earlier_micro_batches,
    plain_buckets,
    segments,
    with_local,
)
from trimtab.predict.replay.inputs import BucketTransfers, ComputeSegment, RoleWork, Stream
from trimtab.predict.replay.replay import replay
from trimtab.predict.step_setting import StepSetting

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from trimtab.cluster import Cluster
    from trimtab.cluster.profile import CodecTime, Profile
    from trimtab.predict.operators.cost_mapper import CostMapper
    from trimtab.predict.operators.measured import Measured
    from trimtab.predict.replay.timeline import Timeline
    from trimtab.workload import Workload


@dataclass(frozen=True, kw_only=True)
class RankSetting:
    """What each rank of a device class does."""

    samples: int
    """Samples per step, over all micro-batches."""

    precisions: Mapping[str, str]
    """By pattern of operator names, as `trimtab.set_precision` takes them."""


@dataclass(frozen=True, kw_only=True)
class JobSetting(StepSetting):
    """Settings of a job on a given cluster."""

    ranks: Mapping[str, RankSetting]
    """By device class."""

    @classmethod
    def of(cls, setting: StepSetting, ranks: Mapping[str, RankSetting]) -> JobSetting:
        """The job in which ranks do this beside what they all do."""
        return cls(ranks=ranks, **{field.name: getattr(setting, field.name) for field in fields(StepSetting)})


def predict_step(
    measured: Measured, cluster: Cluster, setting: JobSetting, *, naive: bool = False
) -> Timeline:
    """Replay one step; see `build_step`."""
    return replay(*build_step(measured, cluster, setting, naive=naive))


def build_step(
    measured: Measured, cluster: Cluster, setting: JobSetting, *, naive: bool = False
) -> tuple[tuple[RoleWork, ...], tuple[BucketTransfers, ...]]:
    """The arguments of `replay`: a role for each device class, and the gradient buckets.

    Args:
        naive: leave out the casts inside operators whose precision was set, as simpler predictors do.

    Raises:
        TrimtabError: naming the operator, codec or link that was not measured.
    """
    workload, profile = measured.bucketed(setting.bucket_cap_mb), measured.profile
    counts = rank_counts(cluster)
    route = setting.route if setting.bits is not None else None
    placement = Placement.on(cluster, route)
    elements = sum(p.tensor.numel for p in workload.parameters if p.trainable)
    roles = []
    for name, count in counts.items():
        own = _own(setting, name, counts)
        kind = cluster.devices[name].kind
        each, more = divmod(own.samples, setting.accumulate)

        def mapper(samples: int) -> CostMapper:
            return measured.mapper(name, kind, max(1, samples), own.precisions, naive=naive)  # noqa: B023

        optimizer = measured.device(name).optimiser
        if optimizer is None:
            raise TrimtabError(
                f"the optimizer step was not measured on device class {name!r}; run `trimtab probe` there"
            )
        stream: tuple[ComputeSegment, ...] = stream_of(workload, mapper(each))
        if setting.accumulate > 1:
            sizes = [(mapper(each + 1), more)] if more else []
            sizes.append((mapper(each), setting.accumulate - 1 - more))
            stream = accumulated_stream(stream, sizes, optimizer.seconds(elements))
        roles.append(
            RoleWork(
                name=name,
                segments=stream,
                optimizer_s=optimizer.seconds(elements),
                ranks=count,
            )
        )
    if placement.world == 1:
        return (replace(roles[0], segments=_without_buckets(roles[0])),), ()
    links = job_links(cluster, profile, route)
    if setting.bits is None:
        return tuple(roles), plain_buckets(workload, placement, links)
    used = sorted({bits for bits in setting.bits_of(workload).values() if bits} | {setting.bits})
    codecs = [
        {bits: codec_time(profile, name, bits, setting.block) for bits in reversed(used)} for name in counts
    ]
    buckets, local = compressed_buckets(workload, placement, links, setting, codecs)
    return with_local(roles, local), buckets


def accumulated_stream(
    last: tuple[ComputeSegment, ...], earlier: Iterable[tuple[CostMapper, int]], optimizer_s: float
) -> tuple[ComputeSegment, ...]:
    """The compute stream of several micro-batches: the stream of the last one after so many of each earlier kind."""
    sizes = list(earlier)
    adding = optimizer_s * ACCUMULATED_BYTES / ADAM_BYTES
    forward = sum(count * sum(mapper.forward_s) for mapper, count in sizes)
    backward = sum(count * (sum(mapper.backward_s) + adding) for mapper, count in sizes)
    return *earlier_micro_batches(forward, backward), *last


_streams: WeakKeyDictionary[CostMapper, dict[float | None, Stream]] = WeakKeyDictionary()


def stream_of(workload: Workload, mapper: CostMapper) -> Stream:
    """The compute stream of a mapper that never changes; jobs share it."""
    streams = _streams.setdefault(mapper, {})
    cap = workload.bucket_cap_mb
    if cap not in streams:
        streams[cap] = Stream(segments(workload, mapper.forward_s, mapper.backward_s))
    return streams[cap]


def predict_memory(measured: Measured, cluster: Cluster, setting: JobSetting) -> dict[str, Memory]:
    """The memory of one rank of each device class."""
    counts = rank_counts(cluster)
    by_device = {}
    for name in counts:
        own = _own(setting, name, counts)
        by_device[name] = step_memory(
            measured.at(-(-own.samples // setting.accumulate)),
            matched(measured.workload, own.precisions) if own.precisions else None,
            kind=cluster.devices[name].kind,
            data_parallel=cluster.world_size > 1,
            bits=setting.bits,
            layer_bits=setting.layer_bits,
            block=setting.block,
            world=cluster.world_size,
            accumulate=setting.accumulate,
            results=measured.results(name),
        )
    return by_device


def rank_counts(cluster: Cluster) -> dict[str, int]:
    """How many ranks of each device class a cluster has, in rank order."""
    counts: dict[str, int] = {}
    for host in cluster.hosts:
        for device, count in host.devices.items():
            counts[device] = counts.get(device, 0) + count * host.count
    return counts


def _own(setting: JobSetting, name: str, counts: Mapping[str, int]) -> RankSetting:
    own = setting.ranks.get(name)
    if own is None:
        raise TrimtabError(
            f"the setting has no entry for device class {name!r}; it must name {', '.join(counts)}"
        )
    return own


def _without_buckets(role: RoleWork) -> tuple[ComputeSegment, ...]:
    return tuple(replace(segment, buckets=()) for segment in role.segments)


def job_links(cluster: Cluster, profile: Profile, route: Route | None = None) -> JobLinks:
    """The rates of a job's links, by class of hosts on this route, with each device class's drag."""
    placement = Placement.on(cluster, route)
    devices = list(rank_counts(cluster))
    by_link = {name: _rates(cluster, profile, name) for name in {one.link for one in placement.classes}}
    between: dict[Collective, tuple[Fit, ...]] = {}
    drag: dict[Collective, tuple[float, ...]] = {}
    for collective in COLLECTIVES:
        known = [by_link[one.link].get(collective) for one in placement.classes]
        fits = tuple(fit for fit in known if fit is not None)
        if len(fits) < len(known):
            continue  # the error comes when it is needed
        between[collective] = fits
        slowest = max(zip(fits, placement.classes, strict=True), key=lambda pair: pair[0].per_byte_s)[1].link
        measured = profile.links.get(slowest, {}).get(collective)
        drag[collective] = tuple(measured.drag.get(name, 0.0) if measured else 0.0 for name in devices)
    local = measured_rates(profile, LOCAL) if placement.hosts > 1 else {}
    return JobLinks(
        between=between,
        inside={collective: local.get(collective, SHARED_MEMORY) for collective in COLLECTIVES},
        drag=drag,
        trees=all(cluster.devices[name].kind == "cuda" for name in devices),
        spared=_spared(cluster, devices, route),
    )


def _spared(cluster: Cluster, devices: Iterable[str], route: Route | None) -> tuple[bool, ...]:
    if route is None or not route.spared:
        return ()
    spared, first = frozenset(route.spared), 0
    owning: set[str] = set()
    for host in cluster.hosts:
        if first not in spared:
            owning.update(host.devices)
        first += sum(host.devices.values()) * host.count
    return tuple(name not in owning for name in devices)


def measured_rates(profile: Profile, link: str) -> dict[Collective, Fit]:
    """The measured rates of a link; collectives that were not measured are missing."""
    return {
        collective: Fit(
            per_message_s=time.per_message_s,
            per_byte_s=time.per_byte_s,
            busy_message_s=time.busy_message_s,
            awaited_message_s=time.awaited_message_s,
            awaited_byte_s=time.awaited_byte_s,
            per_bucket_s=time.per_bucket_s,
        )
        for collective in COLLECTIVES
        if (time := profile.links.get(link, {}).get(collective)) is not None
    }


def _rates(cluster: Cluster, profile: Profile, link: str) -> dict[Collective, Fit]:
    measured = measured_rates(profile, link)
    if link in cluster.links:
        rate = cluster.links[link]
        return dict.fromkeys(COLLECTIVES, nominal(rate.gbit_per_s, rate.latency_us)) | measured
    if measured:
        return measured
    where = (
        "hosts without a `link`" if sum(host.count for host in cluster.hosts) > 1 else "the ranks of one host"
    )
    raise TrimtabError(
        f"links: nothing is known about the link between {where}; give every host a link class with a rate in the "
        "cluster file (or --link 1gbit), or run `trimtab probe` under torchrun on all of its ranks"
    )


def codec_time(profile: Profile, device: str, bits: int, block: int = BLOCK) -> CodecTime:
    """Times of the codec on a device class at so many bits.

    In other blocks than `BLOCK` it is assumed to be as fast as with adaptive bits, or if that was not measured, as at
    the nearest bits that were.
    """
    known = profile.devices[device].codec
    found = known.get(str(bits))
    if block != BLOCK:
        near = min(known, key=lambda other: abs(int(other) - bits), default="")
        found = profile.devices[device].adaptive_codec or known.get(near)
    if found is None:
        raise TrimtabError(
            f"the codec was not measured at {bits} bits on device class {device!r} (measured: "
            f"{', '.join(sorted(known)) or 'none'}); run `trimtab probe --bits {bits}` there"
        )
    return found
