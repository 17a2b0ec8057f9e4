"""From shares by device class to roles, and from roles to the job that is replayed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trimtab.cluster import Cluster
from trimtab.planning.plan import Plan
from trimtab.planning.precision.options import Chosen, lowered
from trimtab.predict.collectives import BLOCK
from trimtab.predict.fsdp_units import Sharding
from trimtab.predict.operators.measured_precisions import MeasuredPrecisions
from trimtab.predict.replayed_job import ReplayedJob, RoleSetting
from trimtab.predict.step_setting import StepSetting
from trimtab.wire_format import ADAPTIVE_BITS, ADAPTIVE_BLOCK
from trimtab.workload import Workload

Ranks = tuple[tuple[str, int], ...]
"""Roles in rank order, each with how many ranks in a row have it."""


@dataclass(frozen=True, kw_only=True)
class RoleLayout:
    """The role of every rank, and each role's device class and share."""

    devices: dict[str, str]
    """By role: its device class."""

    samples: dict[str, int]
    ranks: Ranks

    @property
    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for role, count in self.ranks:
            counts[role] = counts.get(role, 0) + count
        return counts

    def of(self, device: str) -> list[str]:
        return [role for role, own in self.devices.items() if own == device]


def layout(devices: Iterable[str], samples: Mapping[str, tuple[int, ...]]) -> RoleLayout:
    """Roles for given shares: one for each device class, two where its ranks differ by a sample.

    Args:
        devices: the device class of every rank, in rank order.
        samples: by device class, of each of its ranks.
    """
    left = {device: iter(own) for device, own in samples.items()}
    names: dict[tuple[str, int], str] = {}
    taken = set(samples)
    for device, own in samples.items():
        for count in sorted(set(own), reverse=True):
            name = device if len(set(own)) == 1 else f"{device[:24]}_x{count}"
            while name in taken and name != device:
                name += "_"
            taken.add(name)
            names[device, count] = name
    ranks: list[tuple[str, int]] = []
    for device in devices:
        name = names[device, next(left[device])]
        if ranks and ranks[-1][0] == name:
            ranks[-1] = (name, ranks[-1][1] + 1)
        else:
            ranks.append((name, 1))
    assert not any(list(own) for own in left.values()), "every rank has a share"
    return RoleLayout(
        devices={name: device for (device, _), name in names.items()},
        samples={name: count for (_, count), name in names.items()},
        ranks=tuple(ranks),
    )


def even(devices: Iterable[str], total: int) -> dict[str, tuple[int, ...]]:
    """Shares that differ by a sample at most, the larger ones on the first ranks."""
    order = list(devices)
    each, more = divmod(total, len(order))
    samples: dict[str, list[int]] = {}
    for rank, device in enumerate(order):
        samples.setdefault(device, []).append(each + (rank < more))
    return {device: tuple(sorted(own, reverse=True)) for device, own in samples.items()}


def replayed_job(
    measured: MeasuredPrecisions,
    cluster: Cluster,
    job: RoleLayout,
    chosen: Mapping[str, Chosen],
    setting: StepSetting,
) -> ReplayedJob:
    """The job in these precisions with this setting, ready to be replayed; its shares are those of a micro-batch."""
    roles = {
        name: RoleSetting(
            device=device,
            samples=job.samples[name] * setting.accumulate,
            precisions=lowered(chosen.get(name, {})),
        )
        for name, device in job.devices.items()
    }
    return ReplayedJob(measured, cluster, roles, job.ranks, setting)


def setting_of(plan: Plan) -> StepSetting:
    """What all ranks of a plan do alike; adaptive bits are predicted as `wire_format` expects them."""
    return StepSetting(
        bits=ADAPTIVE_BITS if plan.bits == "adaptive" else plan.bits,
        layer_bits=plan.layer_bits,
        block=ADAPTIVE_BLOCK if plan.bits == "adaptive" else BLOCK,
        route=plan.route,
        bucket_cap_mb=plan.bucket_cap_mb,
        accumulate=plan.accumulate,
        sharding=Sharding(hybrid=plan.shard_ranks is not None, weight_bits=plan.weight_bits)
        if plan.wrapper == "fsdp"
        else None,
    )


def alike(workload: Workload) -> tuple[tuple[str, ...], ...]:
    """Operators in the same place of repeated blocks, by the names that set them."""
    groups = []
    for block in workload.blocks:
        for place in range(block.length):
            names = [workload.operators[start + place].setting for start in block.starts]
            group = tuple(name for name in names if name is not None)
            if len(group) == len(names) > 1 and len(set(group)) == len(group):
                groups.append(group)
    return tuple(dict.fromkeys(groups))
