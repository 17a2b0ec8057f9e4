"""Replays with very many roles: those that nobody waits for are left out, and neighboring buckets joined."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from trimtab.predict.replay.timeline import RoleTime

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.predict.replay.inputs import BucketTransfers, RoleWork, Runs, Transfer

MOST_BUCKETS = 40
"""Neighboring buckets are joined into at most about so many."""


def coarse(
    roles: Sequence[RoleWork], buckets: Sequence[BucketTransfers]
) -> tuple[Sequence[RoleWork], Sequence[BucketTransfers], list[Runs]]:
    """Neighboring buckets as one, where there are very many: their times add up, and the last one's gradient counts."""
    most = -(-len(buckets) // MOST_BUCKETS)
    groups: list[list[int]] = []
    for index, bucket in enumerate(buckets):
        last = groups[-1] if groups else []
        if last and len(last) < most and len(buckets[last[0]].transfers) == len(bucket.transfers):
            last.append(index)
        else:
            groups.append([index])
    joined = tuple(_joined([buckets[index] for index in group]) for group in groups)
    slower = [
        replace(
            role, local=tuple(tuple(map(sum, zip(*(role.local[i] for i in g), strict=True))) for g in groups)
        )
        if role.local
        else role
        for role in roles
    ]
    of = {index: place for place, group in enumerate(groups) for index in group}
    return slower, joined, [_joined_runs(role.runs, of, [len(group) for group in groups]) for role in roles]


def _joined(buckets: Sequence[BucketTransfers]) -> BucketTransfers:
    stages = zip(*(bucket.transfers for bucket in buckets), strict=True)
    transfers = tuple(
        replace(
            stage[0],
            latency_s=sum(t.latency_s for t in stage),
            busy_latency_s=sum(max(t.latency_s, t.busy_latency_s) for t in stage),
            seconds=sum(t.seconds for t in stage),
        )
        for stage in stages
    )
    return replace(buckets[-1], transfers=transfers)


def _joined_runs(runs: Runs, of: Mapping[int, int], left: list[int]) -> Runs:
    joined: Runs = []
    waiting = 0.0
    for place, (seconds, buckets, phase, _) in enumerate(runs):
        waiting += seconds
        complete = []
        for bucket in buckets:
            left[of[bucket]] -= 1
            if not left[of[bucket]]:
                complete.append(of[bucket])
        if complete or place + 1 == len(runs) or runs[place + 1][2] != phase:
            joined.append((waiting, tuple(complete), phase, ()))
            waiting = 0.0
    return joined


def of_roles(transfer: Transfer, kept: Sequence[int]) -> Transfer:
    return replace(transfer, drag=tuple(transfer.drag[i] for i in kept)) if transfer.drag else transfer


def dominating(roles: Sequence[RoleWork], buckets: Sequence[BucketTransfers], waiting: bool) -> list[int]:
    """For each role one that is simulated and nowhere faster; itself where there is none.

    Where roles are `waiting` for each other in the middle of a step, every stretch of it counts by itself.
    """
    drags = list(dict.fromkeys(transfer.drag for bucket in buckets for transfer in bucket.transfers))
    figures = np.array(
        [
            [
                *((run[0] for run in role.runs) if waiting else role.ready_s),
                *(seconds for bucket in role.local for seconds in bucket),
                *(drag[index] for drag in drags if drag),
                role.optimizer_s,
                -role.codec_part,
            ]
            for index, role in enumerate(roles)
        ]
    )
    slower = list(range(len(roles)))
    kept: list[int] = []
    for index in sorted(range(len(roles)), key=lambda i: -float(figures[i].sum())):
        worse = np.flatnonzero((figures[kept] >= figures[index]).all(axis=1)).tolist() if kept else []
        if worse:
            slower[index] = kept[worse[0]]
        else:
            kept.append(index)
    return slower


def estimated(role: RoleWork, time: RoleTime, slower: RoleWork) -> RoleTime:
    """The times of a role for which nobody waits: what slows it down is in proportion to the slower role's."""
    own = role.ready_s[-1] + role.optimizer_s
    compute = own * time.compute_s / time.own_s if time.own_s else own
    end = time.end_s - slower.optimizer_s + role.optimizer_s
    return RoleTime(
        name=role.name,
        ranks=role.ranks,
        compute_s=compute,
        own_s=own,
        wait_s=max(0.0, end - compute),
        end_s=end,
    )
