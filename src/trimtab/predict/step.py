"""Time and memory of one step of a job: a workload on a cluster with given settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trimtab.cluster.profile import LOCAL
from trimtab.errors import TrimtabError
from trimtab.predict.links import COLLECTIVES, Collective, Fit, Placement, nominal
from trimtab.predict.memory.step_peak import Memory, step_memory
from trimtab.predict.precision_patterns import matched
from trimtab.predict.replay.build import (
    bits_of,
    compressed_buckets,
    plain_buckets,
    segments,
    with_local,
)
from trimtab.predict.replay.inputs import BucketTransfers, ComputeSegment, RoleWork
from trimtab.predict.replay.replay import replay

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.cluster import Cluster
    from trimtab.cluster.profile import CodecTime, Profile
    from trimtab.predict.operators.measured import Measured
    from trimtab.predict.replay.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class RankSetting:
    """What each rank of a device class does."""

    samples: int
    """Samples per step."""

    precisions: Mapping[str, str]
    """By pattern of operator names, as `trimtab.set_precision` takes them."""


@dataclass(frozen=True, kw_only=True)
class JobSetting:
    """Settings of a job on a given cluster."""

    ranks: Mapping[str, RankSetting]
    """By device class."""

    bits: int | None = None
    """Bits of compressed gradients; None for the backend's own all-reduce."""


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
    workload, profile = measured.workload, measured.profile
    counts = rank_counts(cluster)
    placement = Placement(per_host=tuple(sum(host.devices.values()) for _, host in cluster.machines()))
    elements = sum(p.tensor.numel for p in workload.parameters if p.trainable)
    roles = []
    for name, count in counts.items():
        own = _own(setting, name, counts)
        kind = cluster.devices[name].kind
        mapper = measured.mapper(name, kind, own.samples, own.precisions, naive=naive)
        optimizer = measured.device(name).optimiser
        if optimizer is None:
            raise TrimtabError(
                f"the optimizer step was not measured on device class {name!r}; run `trimtab probe` there"
            )
        roles.append(
            RoleWork(
                name=name,
                segments=segments(workload, mapper.forward_s, mapper.backward_s),
                optimizer_s=optimizer.seconds(elements),
                ranks=count,
            )
        )
    if placement.world == 1:
        return (replace(roles[0], segments=_without_buckets(roles[0])),), ()
    fits = link_fits(cluster, profile, list(counts))
    if setting.bits is None:
        return tuple(roles), plain_buckets(workload, placement, fits)
    codecs = [codec_time(profile, name, setting.bits) for name in counts]
    buckets, local = compressed_buckets(workload, placement, fits, bits_of(workload, setting.bits), codecs)
    return with_local(roles, local), buckets


def predict_memory(measured: Measured, cluster: Cluster, setting: JobSetting) -> dict[str, Memory]:
    """The memory of one rank of each device class."""
    counts = rank_counts(cluster)
    by_device = {}
    for name in counts:
        own = _own(setting, name, counts)
        by_device[name] = step_memory(
            measured.at(own.samples),
            matched(measured.workload, own.precisions) if own.precisions else None,
            kind=cluster.devices[name].kind,
            data_parallel=cluster.world_size > 1,
            bits=setting.bits,
            world=cluster.world_size,
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


def link_fits(
    cluster: Cluster, profile: Profile, devices: Sequence[str]
) -> dict[Collective, tuple[Fit, ...]]:
    """For each collective the fit of the job's slowest link, with each device class's drag."""
    hosts = list(cluster.machines())
    names = {host.link or LOCAL for _, host in hosts} if len(hosts) > 1 else {LOCAL}
    fits_of: dict[Collective, tuple[Fit, ...]] = {}
    for collective in COLLECTIVES:
        candidates = [
            _fits(cluster, profile, name, collective, devices, len(hosts)) for name in sorted(names)
        ]
        present = [c for c in candidates if c is not None]
        if present:
            fits_of[collective] = max(present, key=lambda fits: fits[0].per_byte_s)
    return fits_of


def _fits(
    cluster: Cluster, profile: Profile, link: str, collective: Collective, devices: Sequence[str], hosts: int
) -> tuple[Fit, ...] | None:
    measured = profile.links.get(link, {}).get(collective)
    if measured is not None:
        return tuple(
            Fit(
                per_message_s=measured.per_message_s,
                per_byte_s=measured.per_byte_s,
                drag=measured.drag.get(device, 0.0),
            )
            for device in devices
        )
    if link in cluster.links:
        given = cluster.links[link]
        return (nominal(given.gbit_per_s, given.latency_us),) * len(devices)
    if profile.links.get(link):
        return None  # measured, but not this collective; the error comes when it is needed
    where = "hosts without a `link`" if hosts > 1 else "the ranks of one host"
    raise TrimtabError(
        f"links: nothing is known about the link between {where}; give every host a link class with a rate in the "
        "cluster file, or run `trimtab probe` under torchrun on all of its ranks"
    )


def codec_time(profile: Profile, device: str, bits: int) -> CodecTime:
    """Times of the codec on a device class at so many bits."""
    known = profile.devices[device].codec
    found = known.get(str(bits))
    if found is None:
        raise TrimtabError(
            f"the codec was not measured at {bits} bits on device class {device!r} (measured: "
            f"{', '.join(sorted(known)) or 'none'}); run `trimtab probe --bits {bits}` there"
        )
    return found
