"""Time and memory of a job while its precisions change: only what a change affects is computed again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trimtab.cluster import Cluster, Host
from trimtab.errors import TrimtabError
from trimtab.precision_names import OWN
from trimtab.predict.collectives import Placement
from trimtab.predict.fsdp import build_fsdp, sharded_stream
from trimtab.predict.memory.sharded_peak import sharded_memory
from trimtab.predict.memory.step_peak import step_memory
from trimtab.predict.replay.build import segments
from trimtab.predict.replay.replay import replay
from trimtab.predict.step import JobSetting, RankSetting, accumulated_stream, build_step, stream_of
from trimtab.predict.step_setting import StepSetting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.cluster.profile import CollectiveTime, Profile
    from trimtab.predict.operators.cost_mapper import Change, CostMapper
    from trimtab.predict.operators.low_precision import DeviceKind
    from trimtab.predict.operators.measured_precisions import MeasuredPrecisions
    from trimtab.predict.operators.precision_graph import Results
    from trimtab.predict.replay.inputs import ComputeSegment, RoleWork
    from trimtab.predict.replay.timeline import Timeline
    from trimtab.workload import Workload


@dataclass(frozen=True, kw_only=True)
class RoleSetting:
    """What the ranks of a role do. Two roles may have the same device class."""

    device: str
    samples: int
    """Samples per step, over all micro-batches."""

    precisions: Mapping[str, str]
    """By operator name."""


def by_roles(
    cluster: Cluster, roles: Mapping[str, RoleSetting], ranks: Sequence[tuple[str, int]]
) -> tuple[Cluster, Profile]:
    """The cluster with a device class for each role, and its profile.

    Args:
        ranks: roles in rank order, each with how many ranks in a row have it.
    """
    assert cluster.profile is not None
    hosts = _hosts_of_roles(cluster, roles, ranks)
    of = {role: own.device for role, own in roles.items()}
    profile = cluster.profile
    changed = replace(
        profile,
        devices={role: profile.devices[device] for role, device in of.items() if device in profile.devices},
        links={
            link: {name: _for_roles(time, of) for name, time in collectives.items()}
            for link, collectives in profile.links.items()
        },
    )
    return (
        Cluster(
            version=cluster.version,
            devices={role: cluster.devices[device] for role, device in of.items()},
            links=cluster.links,
            hosts=hosts,
            profile=changed,
        ),
        changed,
    )


def _hosts_of_roles(
    cluster: Cluster, roles: Mapping[str, RoleSetting], ranks: Sequence[tuple[str, int]]
) -> tuple[Host, ...]:
    """The cluster's hosts with roles instead of device classes; neighbors that are alike are one `Host`."""
    total = sum(count for _, count in ranks)
    if total != cluster.world_size:
        raise TrimtabError(f"the plan is for {total} ranks, and the cluster has {cluster.world_size}")
    hosts: list[Host] = []
    runs, left, rank = iter(ranks), 0, 0
    role = ""
    for name, machine in cluster.machines():
        own: dict[str, int] = {}
        for device, count in machine.devices.items():
            while count:
                if not left:
                    role, left = next(runs)
                if roles[role].device != device:
                    raise TrimtabError(
                        f"rank {rank} is of device class {device!r} in the cluster and of {roles[role].device!r} in "
                        "the plan; make the plan again for this cluster"
                    )
                taken = min(count, left)
                own[role] = own.get(role, 0) + taken
                count, left, rank = count - taken, left - taken, rank + taken
        if hosts and (hosts[-1].devices, hosts[-1].link) == (own, machine.link):
            hosts[-1] = replace(hosts[-1], count=hosts[-1].count + 1)
        else:
            # A machine's name includes its number and may be too long for a host's.
            hosts.append(
                Host(name=name if len(name) <= 24 else f"host-{rank}", devices=own, link=machine.link)
            )
    return tuple(hosts)


def _for_roles(time: CollectiveTime, of: Mapping[str, str]) -> CollectiveTime:
    return replace(time, drag={r: time.drag[device] for r, device in of.items() if device in time.drag})


def needed_bytes(
    workload: Workload,
    precisions: Mapping[str, str],
    kind: DeviceKind,
    world: int,
    setting: StepSetting,
    results: Results | None = None,
) -> int:
    """Memory that a device needs for a step: on a GPU including the overhead of its caching allocator.

    Args:
        workload: with the samples of a micro-batch.
        world: ranks of the job; of a sharded one those that share a copy of the model (`ranks_in_memory`).
        results: what lowered operators hand on there.
    """
    if setting.sharding is not None:
        needed = sharded_memory(
            workload,
            precisions,
            ways=world,
            kind=kind,
            keep=setting.sharding.keep,
            bits=setting.bits,
            weight_bits=setting.sharding.weight_bits,
            results=results,
        )
    else:
        needed = step_memory(
            workload,
            precisions or None,
            kind=kind,
            data_parallel=world > 1,
            bits=setting.bits,
            layer_bits=setting.layer_bits,
            block=setting.block,
            world=world,
            accumulate=setting.accumulate,
            results=results,
        )
    return needed.reserved if kind == "cuda" else needed.peak


def ranks_in_memory(cluster: Cluster, setting: StepSetting) -> int:
    """The `world` of `needed_bytes`."""
    if setting.sharding is None:
        return cluster.world_size
    return setting.sharding.ways(Placement.on(cluster))


class ReplayedJob:
    """A job on a cluster, replayed for every question about its step time (a `Pace` of the precision planner)."""

    def __init__(
        self,
        measured: MeasuredPrecisions,
        cluster: Cluster,
        roles: Mapping[str, RoleSetting],
        ranks: Sequence[tuple[str, int]],
        setting: StepSetting = StepSetting(),  # noqa: B008  # frozen
    ) -> None:
        """
        Args:
            measured: of the model on this cluster; jobs that share it share its lookups.
            cluster: with its profile, estimates included.
            ranks: roles in rank order, each with how many ranks in a row have it.
            setting: `accumulate` divides the samples of every role.
        """
        self.roles, self.setting = dict(roles), setting
        self.cluster, profile = by_roles(cluster, roles, ranks)
        by_role = measured.operators.on(profile)
        plain = {name: RankSetting(samples=own.samples, precisions={}) for name, own in roles.items()}
        self._workload = by_role.bucketed(setting.bucket_cap_mb)
        build = build_step if setting.sharding is None else build_fsdp
        self._replayed, self._buckets = build(by_role, self.cluster, JobSetting.of(setting, plain))
        self._place = {role.name: i for i, role in enumerate(self._replayed)}
        self._now: list[RoleWork] = list(self._replayed)
        self._dirty: set[str] = set()
        self._timeline: Timeline | None = None
        self._peaks: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}
        self.mappers: dict[str, CostMapper] = {}
        for name, own in roles.items():
            kind = cluster.devices[own.device].kind
            micro_batch, rest = divmod(own.samples, setting.accumulate)
            assert not rest, f"{own.samples} samples in {setting.accumulate} micro-batches"
            lowered = {operator: p for operator, p in own.precisions.items() if p != OWN}
            self.mappers[name] = measured.mapper(own.device, micro_batch, kind, lowered)
            if lowered:
                self._touch(name)

    def change(self, role: str, operator: str, precision: str) -> tuple[str, Change]:
        change = self.mappers[role].change(operator, None if precision == OWN else precision)
        self._touch(role)
        return role, change

    def undo(self, change: tuple[str, Change]) -> None:
        role, made = change
        self.mappers[role].undo(made)
        self._touch(role)

    def _touch(self, role: str) -> None:
        self._dirty.add(role)
        self._timeline = None

    def timeline(self) -> Timeline:
        """The step in the current precisions."""
        if self._timeline is None:
            for name in self._dirty:
                mapper, place = self.mappers[name], self._place[name]
                parts: tuple[ComputeSegment, ...] = (
                    segments(self._workload, mapper.forward_s, mapper.backward_s)
                    if mapper.original is None
                    else stream_of(self._workload, mapper.original)
                )
                if self.setting.accumulate > 1:
                    earlier = [(mapper, self.setting.accumulate - 1)]
                    parts = accumulated_stream(parts, earlier, self.optimizer_s(name))
                if self.setting.sharding is not None and self._buckets:
                    kind = self.cluster.devices[name].kind
                    own = self.setting.sharding, self.setting.bits
                    parts = sharded_stream(self._workload, self.cluster, *own, kind, parts)
                elif not self._buckets:
                    parts = tuple(replace(part, buckets=()) for part in parts)
                self._now[place] = replace(self._replayed[place], segments=parts)
            self._dirty.clear()
            self._timeline = replay(self._now, self._buckets)
        return self._timeline

    def bound_s(self, part: float) -> float:
        """The step if every rank computed in this part of its time."""
        self.timeline()
        faster = [
            replace(role, segments=tuple(replace(s, seconds=s.seconds * part) for s in role.segments))
            for role in self._now
        ]
        return replay(faster, self._buckets).step_s

    def step_s(self) -> float:
        return self.timeline().step_s

    def compute_s(self, role: str) -> float:
        return self.setting.accumulate * self.mappers[role].total_s

    def optimizer_s(self, role: str) -> float:
        """Time of the optimizer on a rank of the role."""
        return self._replayed[self._place[role]].optimizer_s

    def peak(self, role: str) -> int:
        """Memory that a rank of the role needs; see `needed_bytes`."""
        mapper = self.mappers[role]
        precisions = mapper.precisions
        key = (role, tuple(sorted(precisions.items())))
        if key not in self._peaks:
            world = ranks_in_memory(self.cluster, self.setting)
            kind = self.cluster.devices[role].kind
            results = mapper.graph.results
            self._peaks[key] = needed_bytes(mapper.workload, precisions, kind, world, self.setting, results)
        return self._peaks[key]
