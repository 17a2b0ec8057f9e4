"""One training step of a data-parallel job, replayed event by event.

Every role (identical ranks) is simulated once. A role has one device, which its compute stream, its codec
stages and the active transfers share as threads share a core: each gets what it demands as long as there is
enough, else an equal share. A transfer belongs to all roles at once: it starts when the last one is
ready and proceeds at the rate of the wire, or of the rank that has least capacity for it. Its messages take longer
while a rank computes, where that was measured. Buckets pass through the stages in order, as
`trimtab.collectives.pipeline` runs them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trimtab.predict.replay.fewer_roles import coarse, dominating, estimated, of_roles
from trimtab.predict.replay.inputs import check_inputs
from trimtab.predict.replay.timeline import RoleTime, Span, Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.predict.replay.inputs import BucketTransfers, RoleWork, Runs

_SMALL = 1e-12

FEW_ROLES = 6
"""Up to so many roles all are simulated, with all of their buckets."""


class _Task:
    __slots__ = (
        "bucket",
        "cause",
        "demand",
        "kind",
        "left",
        "name",
        "phase",
        "rate",
        "role",
        "stage",
        "start",
        "ticks",
    )

    def __init__(
        self,
        kind: str,
        role: int | None,
        bucket: int,
        stage: int,
        left: float,
        demand: float,
        phase: str,
        name: str,
    ) -> None:
        self.kind, self.role, self.bucket, self.stage = kind, role, bucket, stage
        self.left, self.demand, self.phase, self.name = left, demand, phase, name
        self.rate, self.start = 0.0, 0.0
        self.cause: int | None = None
        self.ticks: list[tuple[float, float]] | None = None


def replay(roles: Sequence[RoleWork], buckets: Sequence[BucketTransfers]) -> Timeline:
    """Replay one step.

    Every bucket must be completed by a segment of every role, exactly once. Of more than `FEW_ROLES` only those are
    simulated that no other one is slower than in everything: nobody waits for the others, whose own times are
    estimated from the slower one's. Their buckets are joined to at most `MOST_BUCKETS`, unless ranks also wait in the
    middle of a step.
    """
    check_inputs(roles, buckets)
    waiting = any(run[3] for role in roles for run in role.runs)
    unlike = waiting and len({len(role.runs) for role in roles}) > 1
    if len(roles) <= FEW_ROLES or unlike:
        return _Replay(roles, buckets).run()
    slower = dominating(roles, buckets, waiting)
    kept = [index for index, by in enumerate(slower) if by == index]
    place = {index: new for new, index in enumerate(kept)}
    reduced = tuple(
        replace(bucket, transfers=tuple(of_roles(transfer, kept) for transfer in bucket.transfers))
        for bucket in buckets
    )
    simulated = [roles[index] for index in kept]
    timeline = (_Replay(simulated, reduced) if waiting else _Replay(*coarse(simulated, reduced))).run()
    times = [
        timeline.roles[place[index]]
        if index in place
        else estimated(role, timeline.roles[place[slower[index]]], roles[slower[index]])
        for index, role in enumerate(roles)
    ]
    spans = tuple(
        span if span.role is None else replace(span, role=kept[span.role]) for span in timeline.spans
    )
    return Timeline(step_s=timeline.step_s, roles=tuple(times), spans=spans)


class _Replay:
    def __init__(
        self,
        roles: Sequence[RoleWork],
        buckets: Sequence[BucketTransfers],
        runs: Sequence[Runs] | None = None,
    ) -> None:
        self.roles, self.buckets = roles, buckets
        self.runs = [role.runs for role in roles] if runs is None else runs
        self.one_way = any(t.way != "both" for bucket in buckets for t in bucket.transfers)
        self.at = [0] * len(roles)
        self.now = 0.0
        self.active: list[_Task] = []
        self.spans: list[Span] = []
        # Each stage is processed in order: local work by a thread of every role, transfers by a process group.
        # So a stage of a bucket waits for its input and for the previous bucket in that stage.
        self.next_local, behind_local = _queues([len(bucket.transfers) + 1 for bucket in buckets])
        self.next_transfer, behind_transfer = _queues([len(bucket.transfers) for bucket in buckets])
        self.local_needs = [[[1 + after for after in bucket] for bucket in behind_local] for _ in roles]
        self.transfer_needs = [[len(roles) + after for after in bucket] for bucket in behind_transfer]
        self.missing = [set(range(len(buckets))) for _ in roles]
        self.stalled: list[int] = []
        """Roles whose next stretch waits for a bucket."""
        self.computed = [0.0] * len(roles)
        self.waited_from = [0.0] * len(roles)
        self.waited = [0.0] * len(roles)
        self.ended = [0.0] * len(roles)

    def run(self) -> Timeline:
        for role in range(len(self.roles)):
            self._next_run(role, None)
        while self.active:
            self._set_rates()
            step = min(task.left / task.rate if task.left > 0 else 0.0 for task in self.active)
            self.now += step
            done: list[_Task] = []
            going: list[_Task] = []
            for task in self.active:
                task.left -= step * task.rate
                (done if task.left <= _SMALL else going).append(task)
            self.active = going
            for task in done:
                self._finish(task)
        times = tuple(
            RoleTime(
                name=role.name,
                ranks=role.ranks,
                compute_s=self.computed[r],
                own_s=sum(run[0] for run in self.runs[r]) + role.optimizer_s,
                wait_s=self.waited[r],
                end_s=self.ended[r],
            )
            for r, role in enumerate(self.roles)
        )
        return Timeline(step_s=self.now, roles=times, spans=tuple(self.spans))

    def _set_rates(self) -> None:
        """Divide every device among its tasks, and the wire among the transfers."""
        by_role: list[list[_Task]] = [[] for _ in self.roles]
        flows: list[_Task] = []
        computing = any(task.kind == "compute" for task in self.active)
        for task in self.active:
            if task.kind == "flow":
                flows.append(task)
            elif task.kind == "latency":
                task.rate = task.demand if computing else 1.0
            else:
                assert task.role is not None
                by_role[task.role].append(task)
        wires = self._wires(flows)
        for flow, wire in zip(flows, wires, strict=True):
            flow.rate = wire
        for role, tasks in enumerate(by_role):
            drags = [self._drag(flow, role) for flow in flows]
            if not drags and len(tasks) == 1:
                tasks[0].rate = 1.0
                continue
            demands = [task.demand for task in tasks]
            demands += [drag * wire for drag, wire in zip(drags, wires, strict=True)]
            granted = _fair(demands)
            for task, part in zip(tasks, granted, strict=False):
                task.rate = part / task.demand
            for flow, drag, part in zip(flows, drags, granted[len(tasks) :], strict=True):
                if drag > 0:
                    flow.rate = min(flow.rate, part / drag)
        for task in self.active:
            if task.kind == "compute":
                _tick(task, self.now)

    def _wires(self, flows: Sequence[_Task]) -> list[float]:
        """Each flow's part of the wire, whose two directions are shared separately."""
        if len(flows) < 2 or not self.one_way:
            return [1.0 / len(flows)] * len(flows) if flows else []
        ways = [self.buckets[flow.bucket].transfers[flow.stage].way for flow in flows]
        out, into = (sum(way != other for way in ways) for other in ("in", "out"))
        sharing = {"out": out, "in": into, "both": max(out, into)}
        return [1.0 / sharing[way] for way in ways]

    def _drag(self, flow: _Task, role: int) -> float:
        drag = self.buckets[flow.bucket].transfers[flow.stage].drag
        return drag[role] if drag else 0.0

    def _start(self, task: _Task, cause: int | None) -> None:
        task.start, task.cause = self.now, cause
        self.active.append(task)

    def _next_run(self, role: int, cause: int | None) -> None:
        """Start the next stretch of a role's compute stream, or let it wait for the averages."""
        index = self.at[role]
        runs = self.runs[role]
        if index < len(runs):
            seconds, _, phase, waits = runs[index]
            if self.missing[role].intersection(waits):
                self.waited_from[role] = self.now
                self.stalled.append(role)
                return
            task = _Task("compute", role, index, 0, seconds, 1.0, phase, phase)
            self._start(task, cause)
        elif index == len(runs):
            self.waited_from[role] = self.now
            if not self.missing[role]:
                self._optimize(role, cause)

    def _optimize(self, role: int, cause: int | None) -> None:
        self.waited[role] += self.now - self.waited_from[role]
        task = _Task(
            "compute",
            role,
            len(self.runs[role]),
            0,
            self.roles[role].optimizer_s,
            1.0,
            "optimizer",
            "optimizer",
        )
        self._start(task, cause)

    def _finish(self, task: _Task) -> None:
        if task.kind == "latency":
            self._flow(task)
            return
        lane = {"compute": "compute", "local": "codec", "flow": "wire"}[task.kind]
        index = len(self.spans)
        self.spans.append(
            Span(
                role=task.role,
                lane=lane,  # type: ignore[arg-type]
                phase=task.phase,
                name=task.name,
                start=task.start,
                end=self.now,
                stage=task.stage,
                cause=task.cause,
                ticks=tuple(task.ticks or ()),
            )
        )
        if task.kind == "compute":
            self._after_compute(task, index)
        elif task.kind == "local":
            self._after_local(task, index)
        else:
            self._after_flow(task, index)

    def _after_compute(self, task: _Task, index: int) -> None:
        role = task.role
        assert role is not None
        self.computed[role] += self.now - task.start
        if task.phase == "optimizer":
            self.ended[role] = self.now
            return
        ready = self.runs[role][task.bucket][1]
        self.at[role] += 1
        for bucket in ready:
            self._local_may_start(role, bucket, 0, index)
        self._next_run(role, index)

    def _local_may_start(self, role: int, bucket: int, stage: int, cause: int) -> None:
        needs = self.local_needs[role][bucket]
        needs[stage] -= 1
        if needs[stage]:
            return
        local = self.roles[role].local
        seconds = local[bucket][stage] if local else 0.0
        task = _Task(
            "local",
            role,
            bucket,
            stage,
            seconds,
            self.roles[role].codec_part,
            "codec",
            self.buckets[bucket].name,
        )
        if seconds > 0:
            self._start(task, cause)
        else:
            task.cause = cause
            self._after_local(task, cause)

    def _after_local(self, task: _Task, index: int) -> None:
        role, bucket, stage = task.role, task.bucket, task.stage
        assert role is not None
        following = self.next_local[bucket][stage]
        if following is not None:
            self._local_may_start(role, following, stage, index)
        if stage < len(self.buckets[bucket].transfers):
            self._transfer_may_start(bucket, stage, index)
        else:
            self.missing[role].discard(bucket)
            if role in self.stalled:
                self.stalled.remove(role)
                self.waited[role] += self.now - self.waited_from[role]
                self._next_run(role, index)
            elif not self.missing[role] and self.at[role] == len(self.runs[role]):
                self._optimize(role, index)

    def _transfer_may_start(self, bucket: int, stage: int, cause: int) -> None:
        needs = self.transfer_needs[bucket]
        needs[stage] -= 1
        if needs[stage]:
            return
        transfer = self.buckets[bucket].transfers[stage]
        latency, busy = transfer.latency_s, transfer.busy_latency_s
        rate = latency / busy if busy > latency else 1.0  # while a rank computes
        task = _Task("latency", None, bucket, stage, latency, rate, "wire", self.buckets[bucket].name)
        self._start(task, cause)

    def _flow(self, task: _Task) -> None:
        seconds = self.buckets[task.bucket].transfers[task.stage].seconds
        task.kind, task.left = "flow", seconds
        self.active.append(task)

    def _after_flow(self, task: _Task, index: int) -> None:
        bucket, stage = task.bucket, task.stage
        following = self.next_transfer[bucket][stage]
        if following is not None:
            self._transfer_may_start(following, stage, index)
        for role in range(len(self.roles)):
            self._local_may_start(role, bucket, stage + 1, index)


def _tick(task: _Task, now: float) -> None:
    if task.ticks is None:
        task.ticks = []
    task.ticks.append((now, task.left))


def _fair(demands: Sequence[float]) -> list[float]:
    """Divide 1 among demands: each gets what it demands while there is enough, else an equal share."""
    if sum(demands) <= 1.0:
        return list(demands)
    granted = [0.0] * len(demands)
    left, waiting = 1.0, len(demands)
    for index in sorted(range(len(demands)), key=demands.__getitem__):
        granted[index] = min(demands[index], left / waiting)
        left -= granted[index]
        waiting -= 1
    return granted


def _queues(lengths: Sequence[int]) -> tuple[list[list[int | None]], list[list[int]]]:
    """For every bucket and stage, the next bucket with this stage, and 1 if there is a previous one, else 0."""
    following: list[list[int | None]] = [[None] * length for length in lengths]
    behind = [[0] * length for length in lengths]
    last: dict[int, int] = {}
    for bucket, length in enumerate(lengths):
        for stage in range(length):
            if stage in last:
                following[last[stage]][stage] = bucket
                behind[bucket][stage] = 1
            last[stage] = bucket
    return following, behind
