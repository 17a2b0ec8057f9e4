"""The step of a model sharded by `fully_shard` (FSDP2), or by HSDP: sharded inside each host, copied between hosts.

Every repeated block of the model is a unit, and the root is one with all other parameters, as in::

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

Collectives of a step, in this order on every rank (u = 1, 2, ... are the repeated blocks in forward order):

| when                    | what                                                                               |
|-------------------------|------------------------------------------------------------------------------------|
| forward                 | all-gather of the root's weights, then of each unit's before it computes           |
| backward of the root    | all-gather of the last unit's weights (none where they are kept after forward)     |
| backward of unit u      | all-gather of unit u - 1's before it, reduce-scatter of u's gradients after it     |
| end of backward         | reduce-scatter of the root's gradients                                             |

With n values of a unit over S ranks, a rank's shard has n / S of them, padded along the first axis of each parameter:

| collective           | traffic                                | a rank's own work: before; after                   |
|----------------------|----------------------------------------|----------------------------------------------------|
| all-gather           | all-gather of a shard (`LATE`)         | copy n / S; copy n                                 |
| ... in `weight_bits` | all-gather of an encoded shard         | copy and encode n / S; decode and copy n           |
| reduce-scatter       | reduce-scatter of n                    | copy n (Gloo: twice); copy n / S                   |
| ... in `bits`        | all-to-all of S - 1 encoded shards     | copy n, encode n - n / S; decode and add n - n / S |
| HSDP, after that     | all-reduce of the shards between hosts | as a bucket of DDP, plain or in `bits`             |

Assumptions:
- On a CPU torch waits for every collective where it starts it, so nothing overlaps, and a rank whose CPU quota is used
  up by then pauses (`Fit.awaited`). Where trimtab sends in fewer bits over the link, a unit's all-gather starts when
  the unit before it computes, in backward the one after it (`doors.fsdp_prefetch`); reduce-scatters are still waited
  for.
- On a GPU a unit's all-gather may start in forward when the unit two before it starts to compute, in backward
  when the unit after it does. Backward of a unit waits for the reduce-scatter of the unit two after it, whose buffer
  it reuses. Collectives of one group run in the order above.
- Gloo's all-gather between two ranks starts to send before it is ready to receive: the word of the rank that comes
  later waits behind the first half of its own shard, so the other direction starts half a shard late (`LATE`). What
  trimtab sends is exchanged in both directions at once (`collectives.duplex`).
- HSDP's collectives inside a host do not slow down those between hosts.
- Parameters and gradients are sent in the type of the parameters.
- Torch's own code around a collective takes `ShardedTime.unit_s`, and `unit_parameter_s` for each parameter.
- The optimizer updates a rank's shards. Operators on sharded tensors go through Python, which takes
  `ShardedTime.parameter_s` for each parameter. Where none of this was measured, `SHARDED` is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trimtab.cluster.profile import Line, ShardedTime
from trimtab.errors import TrimtabError
from trimtab.predict.collectives import (
    Placement,
    Route,
    Traffic,
    Work,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    stages,
)
from trimtab.predict.fsdp_units import ALL_RANKS, FsdpUnit, Sharding, fsdp_units, shard_bytes, shard_numel
from trimtab.predict.memory.sharded_peak import sharded_memory
from trimtab.predict.precision_patterns import matched
from trimtab.predict.replay.inputs import BucketTransfers, ComputeSegment, RoleWork, Transfer
from trimtab.predict.replay.replay import replay
from trimtab.predict.step import build_step, codec_time, job_links
from trimtab.wire_format import WEIGHT_BLOCK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.cluster import Cluster
    from trimtab.cluster.profile import CodecTime
    from trimtab.predict.links import JobLinks
    from trimtab.predict.memory.step_peak import Memory
    from trimtab.predict.operators.measured import Measured
    from trimtab.predict.replay.timeline import Timeline
    from trimtab.predict.step import JobSetting
    from trimtab.workload import Workload

LATE = 1.5
"""Time of an all-gather between two Gloo ranks that come at different times, over both directions at once."""

SHARDED = {
    "cpu": ShardedTime(copy=Line(a=3e-10, c=2e-6), unit_s=4e-4, unit_parameter_s=3e-5, parameter_s=7e-4),
    "cuda": ShardedTime(copy=Line(a=4e-12, c=1e-5), unit_s=0.0, parameter_s=5e-5),
}
"""Where nothing was measured: as on one core of a server of 2023; on a GPU the host's work for a unit overlaps with
computing."""


def predict_fsdp(measured: Measured, cluster: Cluster, setting: JobSetting) -> Timeline:
    """Replay one step of a sharded model. `setting.bits` are those of gradients.

    Raises:
        TrimtabError: naming what was not measured, or why the hosts cannot be used.
    """
    return replay(*build_fsdp(measured, cluster, setting))


def predict_sharded_memory(measured: Measured, cluster: Cluster, setting: JobSetting) -> dict[str, Memory]:
    """The memory of one rank of each device class."""
    sharding = setting.sharding or ALL_RANKS
    ways = sharding.ways(Placement.on(cluster))
    return {
        name: sharded_memory(
            measured.at(own.samples),
            matched(measured.workload, own.precisions) if own.precisions else None,
            ways=ways,
            kind=cluster.devices[name].kind,
            keep=sharding.keep,
            bits=setting.bits,
            weight_bits=sharding.weight_bits,
            results=measured.results(name),
        )
        for name, own in setting.ranks.items()
    }


def build_fsdp(
    measured: Measured, cluster: Cluster, setting: JobSetting
) -> tuple[tuple[RoleWork, ...], tuple[BucketTransfers, ...]]:
    """The arguments of `replay`; each collective of a unit is a bucket. Without a sharding it is FSDP2's default."""
    workload, profile, sharding = measured.workload, measured.profile, setting.sharding or ALL_RANKS
    placement = Placement.on(cluster)
    if setting.accumulate > 1:
        raise TrimtabError(
            "the step of a sharded model is predicted for one micro-batch; set accumulate to 1"
        )
    plain, _ = build_step(measured, cluster, replace(setting, bits=None))
    if placement.world == 1:
        return plain, ()
    ways = sharding.ways(placement)
    inside = ways < placement.world
    shard = Placement.of([ways]) if inside else placement
    links = job_links(cluster, profile)
    units = fsdp_units(workload)
    kinds = {role.name: cluster.devices[role.name].kind for role in plain}
    ahead = {k: _gathers_ahead(k, cluster, sharding, setting.bits) for k in set(kinds.values())}
    programs = {
        kind: _program(workload, units, keep=sharding.keep, blocking=kind == "cpu", ahead=ahead[kind])
        for kind in ahead
    }
    calls = next(iter(programs.values())).calls
    exchanges = [
        _gather(units[call.unit], shard, sharding.weight_bits, late=not (links.trees or any(ahead.values())))
        if call.gathers
        else _reduce(units[call.unit], placement, shard, setting.bits, ring=links.trees)
        for call in calls
    ]
    buckets = tuple(
        BucketTransfers(
            name=f"{'weights' if call.gathers else 'gradients'} of {units[call.unit].name or 'the root'}",
            transfers=_transfers(exchange, links, inside),
        )
        for call, exchange in zip(calls, exchanges, strict=True)
    )
    trainable = [p for p in workload.parameters if p.trainable]
    elements = sum(shard_numel(p, ways) for p in trainable)
    roles = []
    for role in plain:
        device = profile.devices[role.name]
        cost = device.sharded or SHARDED[kinds[role.name]]
        codecs = {
            bits: codec_time(profile, role.name, bits)
            for bits in (setting.bits, sharding.weight_bits)
            if bits is not None
        }
        assert device.optimiser is not None, "build_step requires it"
        roles.append(
            replace(
                role,
                segments=_segments(programs[kinds[role.name]], role.segments),
                optimizer_s=device.optimiser.seconds(elements) + cost.parameter_s * len(trainable),
                local=tuple(exchange.local_s(codecs, cost) for exchange in exchanges),
            )
        )
    return tuple(roles), buckets


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A collective of one unit."""

    unit: int
    gathers: bool
    """Weights are gathered; else gradients are reduced."""


@dataclass(frozen=True, kw_only=True)
class _Program:
    """What the compute stream of a rank does in a step: ("start", call), ("wait", call) and ("run", segment)."""

    actions: tuple[tuple[str, int], ...]
    calls: tuple[_Call, ...]


def _gathers_ahead(kind: str, cluster: Cluster, sharding: Sharding, bits: int | None) -> bool:
    """Whether a CPU rank computes while weights of the next unit travel: where `trimtab.compress` sends them."""
    placement = Placement.on(cluster)
    compressed = bits is not None or sharding.weight_bits is not None
    return kind == "cpu" and compressed and sharding.ways(placement) == placement.world


def _program(
    workload: Workload, units: Sequence[FsdpUnit], *, keep: bool, blocking: bool, ahead: bool
) -> _Program:
    """The order of collectives and segments.

    Args:
        blocking: a rank waits for each collective where it starts it,
        ahead: but for gathers, of which it starts one while the unit before computes.
    """
    actions: list[tuple[str, int]] = []
    calls: list[_Call] = []
    started: dict[tuple[int, bool, str], int] = {}

    def start(unit: int, phase: str, *, gathers: bool = True) -> None:
        """Once in a phase, and only where there is something to send."""
        sent = units[unit].parameters if gathers else units[unit].trainable
        if (unit, gathers, phase) in started or not sent:
            return
        started[unit, gathers, phase] = len(calls)
        actions.append(("start", len(calls)))
        if blocking and not (gathers and ahead):
            actions.append(("wait", len(calls)))
        calls.append(_Call(unit=unit, gathers=gathers))

    def wait(unit: int, phase: str, *, gathers: bool = True) -> None:
        call = started.get((unit, gathers, phase))
        if call is not None and (not blocking or (gathers and ahead)):
            actions.append(("wait", call))

    count, total = len(workload.operators), len(units)
    entered = {unit.first: index for index, unit in enumerate(units) if index}
    left = {unit.last: index for index, unit in enumerate(units) if index}
    start(0, "forward")
    if total > 1 and not blocking:
        start(1, "forward")
    wait(0, "forward")
    if total > 2 and not blocking:
        start(2, "forward")
    if total > 1 and ahead:
        start(1, "forward")
    for operator in range(count):
        if operator in entered:
            unit = entered[operator]
            start(unit, "forward")
            wait(unit, "forward")
            if unit + 2 < total and not blocking:
                start(unit + 2, "forward")
            if unit + 1 < total and ahead:
                start(unit + 1, "forward")
        actions.append(("run", operator))
    if total > 1 and not keep:
        start(total - 1, "backward")
    for operator in reversed(range(count)):
        if operator in left:
            unit = left[operator]
            wait(unit, "backward")
            if unit > 1 and not keep:
                start(unit - 1, "backward")
        actions.append(("run", 2 * count - 1 - operator))
        if operator in entered:
            unit = entered[operator]
            start(unit, "backward", gathers=False)
            if unit + 1 < total:
                wait(unit + 1, "backward", gathers=False)
    start(0, "backward", gathers=False)
    return _Program(actions=tuple(actions), calls=tuple(calls))


def sharded_stream(
    workload: Workload,
    cluster: Cluster,
    sharding: Sharding,
    bits: int | None,
    kind: str,
    computed: Sequence[ComputeSegment],
) -> tuple[ComputeSegment, ...]:
    """The compute stream of a rank, with its waits and starts, from that of its operators."""
    units, ahead = fsdp_units(workload), _gathers_ahead(kind, cluster, sharding, bits)
    program = _program(workload, units, keep=sharding.keep, blocking=kind == "cpu", ahead=ahead)
    return _segments(program, computed)


def _segments(program: _Program, computed: Sequence[ComputeSegment]) -> tuple[ComputeSegment, ...]:
    """A role's stream with its waits and starts."""
    stream: list[ComputeSegment] = []
    waits: tuple[int, ...] = ()
    for action, index in program.actions:
        if action == "wait":
            waits = (*waits, index)
        elif action == "run":
            stream.append(replace(computed[index], buckets=(), waits=waits))
            waits = ()
        elif stream and not waits:
            stream[-1] = replace(stream[-1], buckets=(*stream[-1].buckets, index))
        else:
            phase = stream[-1].phase if stream else "forward"
            stream.append(ComputeSegment(name="", seconds=0.0, phase=phase, buckets=(index,), waits=waits))
            waits = ()
    return tuple(stream)


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """A unit's collectives, and a rank's work before, between and after them."""

    shard: tuple[Traffic, ...]
    """Over the ranks that share a copy."""

    replicas: tuple[Traffic, ...] = ()
    """Over the copies of a shard, after that."""

    copied: tuple[float, ...]
    """Values, in each place."""

    parameters: int
    """Of the unit."""

    work: tuple[Work, ...] = ()
    """Of the codec; empty if nothing is encoded."""

    bits: int | None = None

    def local_s(self, codecs: Mapping[int, CodecTime], cost: ShardedTime) -> tuple[float, ...]:
        seconds = [cost.copy.seconds(copied) if copied else 0.0 for copied in self.copied]
        if self.bits is not None:
            coded = (work.seconds(codecs[self.bits]) for work in self.work)
            seconds = [copied + own for copied, own in zip(seconds, coded, strict=True)]
        return (seconds[0] + cost.unit_s + self.parameters * cost.unit_parameter_s, *seconds[1:])


def _gather(unit: FsdpUnit, shard: Placement, bits: int | None, late: bool) -> _Exchange:
    ways = shard.world
    times = LATE if bits is None and ways == 2 and late else 1.0
    own = sum(shard_numel(p, ways) for p in unit.parameters)
    work = (Work(encoded=own, encodes=1), Work(decoded=own * ways, decodes=ways))
    return _Exchange(
        shard=(all_gather(times * shard_bytes(unit.parameters, ways, bits, WEIGHT_BLOCK), shard),),
        copied=(own, own * ways),
        parameters=len(unit.parameters),
        work=work if bits else (),
        bits=bits,
    )


def _reduce(
    unit: FsdpUnit, placement: Placement, shard: Placement, bits: int | None, ring: bool
) -> _Exchange:
    ways, others, hybrid = shard.world, shard.world - 1, shard.world < placement.world
    own = sum(shard_numel(p, ways) for p in unit.trainable)
    payload = shard_bytes(unit.trainable, ways, bits)
    if bits is None:
        between = (all_reduce(ways * payload, placement.leaders()),) if hybrid else ()
        return _Exchange(
            shard=(reduce_scatter(ways * payload, shard, ring=ring),),
            replicas=between,
            copied=(own * ways * (1 if ring else 2), own, *(0 for _ in between)),
            parameters=len(unit.trainable),
        )
    work = [Work(encoded=others * own, encodes=1), Work(added=others * own, adds=others)]
    replicas: tuple[Traffic, ...] = ()
    if hybrid:
        way = stages(Route(), placement.leaders(), own, payload)
        # The ranks of a host exchange their shards at the same time, through one interface.
        replicas = tuple(replace(t, nbytes=tuple(ways * sent for sent in t.nbytes)) for t in way.traffic)
        work += [replace(way.work[0], added=others * own, adds=others), *way.work[1:]]
        del work[1]
    return _Exchange(
        shard=(all_to_all(others * payload, shard),),
        replicas=replicas,
        copied=(own * ways, 0, *(0 for _ in replicas)),
        parameters=len(unit.trainable),
        work=tuple(work),
        bits=bits,
    )


def _transfers(exchange: _Exchange, links: JobLinks, inside: bool) -> tuple[Transfer, ...]:
    transfers = []
    for traffic in exchange.shard if inside else ():
        # Beside what the host's interface carries.
        transfers.append(
            Transfer(latency_s=traffic.seconds((links.inside[traffic.collective],)), seconds=0.0)
        )
    for traffic in exchange.replicas if inside else exchange.shard:
        fits = links.fits(traffic.collective)
        if not links.trees:
            fits = tuple(fit.awaited for fit in fits)
        drag = links.drag[traffic.collective]
        transfers.append(
            Transfer(
                latency_s=traffic.latency_s(fits),
                busy_latency_s=traffic.busy_latency_s(fits),
                seconds=traffic.flow_s(fits),
                drag=drag,
            )
        )
    return tuple(transfers)
