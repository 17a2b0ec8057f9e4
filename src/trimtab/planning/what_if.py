"""Would this cluster, this plan, these cards help? One simulated job for each change. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from trimtab.cluster import Cluster, Device, Host, Link
from trimtab.cluster.profile import Profile
from trimtab.errors import TrimtabError
from trimtab.planning.compression.route import job_route
from trimtab.planning.plan import Plan
from trimtab.planning.roles import setting_of
from trimtab.predict.collectives import BLOCK
from trimtab.predict.extrapolation import out_of_reach
from trimtab.predict.memory.step_peak import Memory
from trimtab.predict.operators.estimate import known_as, with_estimates
from trimtab.predict.operators.measured import Measured
from trimtab.predict.replay.inputs import RoleWork
from trimtab.predict.replay.replay import replay
from trimtab.predict.replay.timeline import Timeline, bottleneck
from trimtab.predict.replayed_job import RoleSetting, by_roles
from trimtab.predict.step import (
    JobSetting,
    RankSetting,
    build_step,
    predict_memory,
    predict_step,
    rank_counts,
)
from trimtab.workload import Workload

EXCHANGE_MATTERS = 0.3
"""Fraction of the step from which exposed communication and codec are worth an advice."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One simulated job."""

    name: str
    """The change, or "as given"."""

    cluster: Cluster
    setting: JobSetting
    timeline: Timeline
    roles: tuple[RoleWork, ...]
    memory: dict[str, Memory]
    estimated: tuple[str, ...]
    """Device classes whose times come from datasheets."""

    advice: str = ""
    """What other bits would do, if that matters."""

    out_of_reach: str | None = None
    """A warning when batches are extrapolated far from those that were probed."""

    @property
    def samples(self) -> int:
        counts = rank_counts(self.cluster)
        return sum(self.setting.ranks[name].samples * count for name, count in counts.items())

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.timeline.step_s

    @property
    def cost_per_million(self) -> float | None:
        """Cost of a million samples in the currency of the cluster file; None unless every device has a price."""
        counts = rank_counts(self.cluster)
        prices = {name: self.cluster.devices[name].price_per_hour for name in counts}
        hourly = [price * counts[name] for name, price in prices.items() if price is not None]
        return sum(hourly) / 3600 / self.samples_per_s * 1e6 if len(hourly) == len(counts) else None

    def row(self) -> dict[str, Any]:
        """The outcome as one row of a table."""
        parts = self.timeline.breakdown()
        row: dict[str, Any] = {
            "what": self.name,
            "ranks": self.cluster.world_size,
            "step_ms": self.timeline.step_s * 1e3,
            "samples_per_s": self.samples_per_s,
            **{f"{phase}_ms": seconds * 1e3 for phase, seconds in parts.items()},
            "longest_wait_ms": max(role.wait_s for role in self.timeline.roles) * 1e3,
            "least_utilization": min(role.utilization for role in self.timeline.roles),
            "peak_gib": max(m.peak for m in self.memory.values()) / 2**30,
            "estimated": ", ".join(self.estimated) or None,
        }
        if (cost := self.cost_per_million) is not None:
            row["cost_per_million_samples"] = cost
        return row

    def words(self) -> str:
        """The bottleneck, and what does not fit, in words."""
        advice = f"; {self.advice}" if self.advice else ""
        sentences = [f"{self.name}: {bottleneck(self.timeline)}{advice}"]
        for name, need in self.memory.items():
            have = self.cluster.devices[name].memory_gib
            if have is not None and need.reserved > have * 2**30:
                sentences.append(
                    f"{name} has {have:g} GiB and needs {need.reserved / 2**30:.1f} GiB (most in {need.phase} at "
                    f"{need.operator}); give it a smaller share or lower precisions"
                )
        return ". ".join(sentences)


def simulate(
    cluster: Cluster,
    workload: Workload,
    setting: JobSetting | None = None,
    *,
    name: str = "as given",
    like: Measured | None = None,
) -> Outcome:
    """Predict one job. Without a setting every rank takes the workload's batch, with nothing lowered or compressed.

    `like` is the same model on another cluster, whose lookups are shared.

    Raises:
        TrimtabError: the cluster has no profile, or an operator, link or codec was not measured.
    """
    profile = _profile(cluster)
    filled = with_estimates(cluster, profile)
    measured = Measured(workload, filled) if like is None else like.on(filled)
    if setting is None:
        setting = even(cluster, workload.batch_size)
    setting = _routed(measured, cluster, setting)
    roles, buckets = build_step(measured, cluster, setting)
    timeline = replay(roles, buckets)
    return Outcome(
        name=name,
        cluster=cluster,
        setting=setting,
        timeline=timeline,
        advice=_advice(measured, cluster, setting, timeline),
        roles=roles,
        memory=predict_memory(measured, cluster, setting),
        estimated=tuple(n for n in rank_counts(cluster) if filled.devices[n].estimated),
        out_of_reach=out_of_reach(
            filled, workload.model, [(n, setting.ranks[n].samples) for n in rank_counts(cluster)]
        ),
    )


def _routed(measured: Measured, cluster: Cluster, setting: JobSetting) -> JobSetting:
    """The setting with the route that its bits would take."""
    if setting.bits is None or setting.route is not None:
        return setting
    return replace(
        setting, route=job_route(cluster, measured.profile, measured.workload, setting.bits, setting.block)
    )


def _advice(measured: Measured, cluster: Cluster, setting: JobSetting, timeline: Timeline) -> str:
    """What another number of bits would do, where the exchange of gradients matters; every measured one is tried."""
    parts = timeline.breakdown()
    if parts["wire"] + parts["codec"] < EXCHANGE_MATTERS * timeline.step_s:
        return ""
    known = [set(measured.device(name).codec) for name in rank_counts(cluster)]
    steps = {}
    for bits in (None, *sorted(map(int, set.intersection(*known)), reverse=True)):
        if bits != setting.bits:
            uniform = replace(setting, bits=bits, route=None, layer_bits={}, block=BLOCK)
            other = _routed(measured, cluster, uniform)
            steps[bits] = predict_step(measured, cluster, other).step_s
    if not steps:
        return "use a faster link, or probe the codec to see what fewer bits would do"
    best = min(steps, key=lambda bits: steps[bits])
    how = "sent uncompressed" if best is None else f"in {best} bits"
    if steps[best] < timeline.step_s:
        return f"with gradients {how} a step would take {steps[best] * 1e3:.4g} ms"
    return f"other bits would not help (with gradients {how} a step would take {steps[best] * 1e3:.4g} ms)"


def _profile(cluster: Cluster) -> Profile:
    if cluster.profile is None:
        raise TrimtabError(
            "simulate: the cluster file holds no measurements; run `trimtab probe --out FILE` on a machine like one of "
            "its hosts and copy `profile` from there, or merge the files with `trimtab probe --merge`"
        )
    return cluster.profile


def even(cluster: Cluster, samples: int) -> JobSetting:
    """The same share for every rank, in the model's own precision."""
    ranks = {name: RankSetting(samples=samples, precisions={}) for name in rank_counts(cluster)}
    return JobSetting(ranks=ranks, bits=None)


def planned(plan: Plan, cluster: Cluster) -> tuple[Cluster, JobSetting]:
    """The job of a plan: the cluster with roles as device classes, and their settings.

    Raises:
        TrimtabError: the plan is for another number of ranks or other devices.
    """
    roles = {
        name: RoleSetting(device=role.device, samples=role.samples, precisions=role.precisions)
        for name, role in plan.roles.items()
    }
    filled = replace(cluster, profile=with_estimates(cluster, _profile(cluster)))
    changed, _ = by_roles(filled, roles, plan.ranks)
    ranks = {
        name: RankSetting(samples=role.samples, precisions=role.precisions)
        for name, role in plan.roles.items()
    }
    return changed, JobSetting.of(setting_of(plan), ranks)


# What if


def without(cluster: Cluster, what: str) -> Cluster:
    """The cluster without one rank: of the host of that name, or of the first host with that device class."""
    for index, host in enumerate(cluster.hosts):
        fits = [d for d in host.devices if d == what or fnmatchcase(host.name, what)]
        if not fits:
            continue
        others = [*cluster.hosts[:index], *cluster.hosts[index + 1 :]]
        left = dict(host.devices)
        left[fits[-1]] -= 1
        left = {device: count for device, count in left.items() if count}
        kept = (
            [replace(host, devices=left, count=1, name=f"{host.name}-x" if host.count > 1 else host.name)]
            if left
            else []
        )
        if host.count > 1:
            kept.append(replace(host, count=host.count - 1))
        if not (others or kept):
            raise TrimtabError(f"simulate: without {what!r} the cluster is empty")
        return replace(cluster, hosts=(*others[:index], *kept, *others[index:]))
    names = ", ".join([*(h.name for h in cluster.hosts), *cluster.devices])
    raise TrimtabError(f"simulate: there is no host or device class {what!r}; there are {names}")


def added(cluster: Cluster, what: str) -> Cluster:
    """The cluster with more devices: ``2xT4`` is a new host with two, on the link that the others have."""
    matched = re.fullmatch(r"(?:(\d+)x)?([A-Za-z0-9_-]+)", what)
    if matched is None:
        raise TrimtabError(
            f"simulate: cannot add {what!r}; write 2xT4, or 1x and a device class of the cluster"
        )
    count, name = int(matched[1] or 1), matched[2]
    devices = dict(cluster.devices)
    if name not in devices:
        probe = Device(kind="cuda", speed=1.0)
        known = known_as(name, probe)
        if known is None:
            raise TrimtabError(
                f"simulate: {name!r} is neither a device class of the cluster ({', '.join(devices)}) nor in the "
                "catalog; probe one and merge its file"
            )
        devices[name] = Device(kind=known.kind, speed=1.0, memory_gib=known.memory_gib, model=known.model)
    link = next((host.link for host in cluster.hosts if host.link is not None), None)
    host = Host(name=f"added-{name}", devices={name: count}, link=link)
    return replace(cluster, devices=devices, hosts=(*cluster.hosts, host))


def faster_links(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with links this many times as fast; latencies stay the same."""
    if not factor > 0:
        raise TrimtabError(f"simulate: a link cannot be {factor:g} times as fast")
    links = {
        n: Link(gbit_per_s=k.gbit_per_s * factor, latency_us=k.latency_us) for n, k in cluster.links.items()
    }
    profile = cluster.profile
    if profile is not None:
        scaled = {
            name: {c: replace(time, per_byte_s=time.per_byte_s / factor) for c, time in collectives.items()}
            for name, collectives in profile.links.items()
        }
        profile = replace(profile, links=scaled)
    return replace(cluster, links=links, profile=profile)


def adapted(setting: JobSetting, cluster: Cluster, samples: int) -> JobSetting:
    """The setting for another cluster: new device classes take `samples`, with nothing lowered."""
    ranks: Mapping[str, RankSetting] = {
        name: setting.ranks.get(name, RankSetting(samples=samples, precisions={}))
        for name in rank_counts(cluster)
    }
    return replace(setting, ranks=ranks)


def what_ifs(
    cluster: Cluster,
    workload: Workload,
    setting: JobSetting,
    *,
    remove: Sequence[str] = (),
    add: Sequence[str] = (),
    link_factor: float | None = None,
    bits: int | None = None,
    samples: int | None = None,
) -> list[Outcome]:
    """The job as given, and with each single change. New ranks take `samples`, by default the workload's batch."""
    samples = workload.batch_size if samples is None else samples
    cases = [("as given", cluster, setting)]
    cases += [
        (f"without {what}", changed := without(cluster, what), adapted(setting, changed, samples))
        for what in remove
    ]
    cases += [
        (f"with {what}", changed := added(cluster, what), adapted(setting, changed, samples)) for what in add
    ]
    if link_factor is not None:
        cases.append((f"links {link_factor:g} times as fast", faster_links(cluster, link_factor), setting))
    if bits is not None:
        cases.append(
            (f"gradients in {bits} bits", cluster, replace(setting, bits=bits, layer_bits={}, block=BLOCK))
        )
    like = Measured(workload, _profile(cluster))
    return [simulate(one, workload, how, name=name, like=like) for name, one, how in cases]
