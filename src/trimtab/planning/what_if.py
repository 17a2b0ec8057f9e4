"""Would this cluster, this plan, these cards help? One simulated job for each change. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trimtab.cluster import Cluster
from trimtab.cluster.profile import Profile
from trimtab.errors import TrimtabError
from trimtab.planning.compression.route import job_route
from trimtab.planning.plan import Plan
from trimtab.planning.roles import setting_of
from trimtab.predict.collectives import BLOCK
from trimtab.predict.extrapolation import out_of_reach
from trimtab.predict.fsdp import build_fsdp, predict_sharded_memory
from trimtab.predict.memory.step_peak import Memory
from trimtab.predict.operators.estimate import with_estimates
from trimtab.predict.operators.measured import Measured
from trimtab.predict.replay.inputs import BucketTransfers, RoleWork
from trimtab.predict.replay.replay import replay
from trimtab.predict.replay.timeline import Timeline, bottleneck
from trimtab.predict.replayed_job import RoleSetting, by_roles
from trimtab.predict.step import (
    JobSetting,
    RankSetting,
    build_step,
    predict_memory,
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

    planned: bool = False
    """Whether shares and precisions are a plan's, which has looked for better ones."""

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
        hourly = price_per_hour(self.cluster)
        return None if hourly is None else hourly / 3600 / self.samples_per_s * 1e6

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
        sentences = [f"{self.name}: {bottleneck(self.timeline, advice=not self.planned)}{advice}"]
        for name, need in self.memory.items():
            have = self.cluster.devices[name].memory_gib
            if have is not None and need.reserved > have * 2**30:
                sentences.append(
                    f"{name} has {have:g} GiB and needs {need.reserved / 2**30:.1f} GiB (most in {need.phase} at "
                    f"{need.operator}); give it a smaller share or lower precisions"
                )
        return ". ".join(sentences)


def price_per_hour(cluster: Cluster) -> float | None:
    """What all devices of a cluster cost; None unless every one has a price."""
    prices = [(cluster.devices[name].price_per_hour, count) for name, count in rank_counts(cluster).items()]
    known = [price * count for price, count in prices if price is not None]
    return sum(known) if len(known) == len(prices) else None


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
    roles, buckets = _built(measured, cluster, setting)
    timeline = replay(roles, buckets)
    return Outcome(
        name=name,
        cluster=cluster,
        setting=setting,
        timeline=timeline,
        advice=_advice(measured, cluster, setting, timeline),
        roles=roles,
        memory=predict_memory(measured, cluster, setting)
        if setting.sharding is None
        else predict_sharded_memory(measured, cluster, setting),
        estimated=tuple(n for n in rank_counts(cluster) if filled.devices[n].estimated),
        out_of_reach=out_of_reach(
            filled,
            workload,
            [(n, max(1, setting.ranks[n].samples // setting.accumulate)) for n in rank_counts(cluster)],
        ),
    )


def _routed(measured: Measured, cluster: Cluster, setting: JobSetting) -> JobSetting:
    """The setting with the route that its bits would take."""
    if setting.bits is None or setting.route is not None:
        return setting
    return replace(
        setting, route=job_route(cluster, measured.profile, measured.workload, setting.bits, setting.block)
    )


def _built(
    measured: Measured, cluster: Cluster, setting: JobSetting
) -> tuple[tuple[RoleWork, ...], tuple[BucketTransfers, ...]]:
    build = build_step if setting.sharding is None else build_fsdp
    return build(measured, cluster, setting)


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
            steps[bits] = replay(*_built(measured, cluster, other)).step_s
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
    if plan.tensor_groups:
        raise TrimtabError(
            "simulate: only steps of DDP and FSDP2 are replayed here, and this plan uses tensor parallelism; the plan "
            f"itself holds what is predicted for it: {plan.predicted.step_s * 1e3:.4g} ms a step; for what-ifs "
            "leave out --plan: they are planned anew, tensor groups included"
        )
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


def what_ifs(
    cluster: Cluster,
    workload: Workload,
    setting: JobSetting,
    *,
    bits: int | None = None,
    of_plan: bool = False,
) -> list[Outcome]:
    """The job as given, and if asked with other bits. Other clusters are planned: see `trimtab.planning.cases`.

    `of_plan`: shares and precisions are a plan's.
    """
    cases = [("as given", setting)]
    if bits is not None:
        cases.append((f"gradients in {bits} bits", replace(setting, bits=bits, route=None, layer_bits={})))
    like = Measured(workload, _profile(cluster))
    outcomes = (simulate(cluster, workload, how, name=name, like=like) for name, how in cases)
    return [replace(outcome, planned=of_plan) for outcome in outcomes]
