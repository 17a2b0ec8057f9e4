"""Builds the roles and buckets of a replay from the times of operators, codec and links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trimtab.cluster.profile import CodecTime, Line
from trimtab.predict.collectives import (
    Placement,
    Route,
    Stages,
    Traffic,
    all_reduce,
    stages,
    tree_all_reduce,
)
from trimtab.predict.links import JobLinks
from trimtab.predict.replay.inputs import BucketTransfers, ComputeSegment, RoleWork, Transfer
from trimtab.predict.replay.replay import replay
from trimtab.predict.step_setting import StepSetting
from trimtab.wire_format import encoded_bytes
from trimtab.workload import Workload

ACCUMULATED_BYTES = 12
"""Adding a micro-batch's gradient to the sum so far reads two values and writes one."""


def payloads(workload: Workload, setting: StepSetting) -> tuple[int, ...]:
    """Encoded bytes of every bucket."""
    sizes = {p.name: p.tensor.numel for p in workload.parameters}
    bits = setting.bits_of(workload)
    return tuple(
        sum(encoded_bytes(sizes[name], bits[name], setting.block) for name in bucket.parameters)
        for bucket in workload.buckets
    )


def segments(
    workload: Workload, forward: Sequence[float], backward: Sequence[float]
) -> tuple[ComputeSegment, ...]:
    """The compute stream of a step: operators forward, then backward in reverse, with the buckets they complete."""
    ready: dict[int, list[int]] = {}
    for index, bucket in enumerate(workload.buckets):
        ready.setdefault(max(bucket.ready, 0), []).append(index)
    stream = [
        ComputeSegment(name=o.name, seconds=forward[o.index], phase="forward") for o in workload.operators
    ]
    stream += [
        ComputeSegment(
            name=o.name,
            seconds=backward[o.index],
            phase="backward",
            buckets=tuple(ready.get(o.index, ())),
        )
        for o in reversed(workload.operators)
    ]
    return tuple(stream)


def earlier_micro_batches(forward_s: float, backward_s: float) -> tuple[ComputeSegment, ...]:
    """The micro-batches before the last, whose gradients are not exchanged, in one piece for each phase."""
    return (
        ComputeSegment(name="earlier micro-batches", seconds=forward_s, phase="forward"),
        ComputeSegment(name="earlier micro-batches", seconds=backward_s, phase="backward"),
    )


def plain_buckets(workload: Workload, placement: Placement, links: JobLinks) -> tuple[BucketTransfers, ...]:
    """Buckets that the backend all-reduces."""
    return tuple(
        BucketTransfers(name=f"bucket {i}", transfers=(plain_transfer(bucket.nbytes, placement, links),))
        for i, bucket in enumerate(workload.buckets)
    )


def plain_transfer(nbytes: int, placement: Placement, links: JobLinks, *, awaited: bool = False) -> Transfer:
    """An all-reduce by the backend, on the faster of its ways; `awaited` by ranks that computed until it starts."""
    ways = [all_reduce(nbytes, placement)]
    if links.trees:
        ways.append(tree_all_reduce(nbytes, placement))
    fits = links.fits("all_reduce")
    fastest = min(ways, key=lambda way: way.seconds(fits))
    made = _transfer(fastest, links)
    if awaited and not links.trees:
        fits = tuple(fit.awaited for fit in fits)
        made = replace(made, latency_s=fastest.latency_s(fits), seconds=fastest.flow_s(fits))
    return made


def _transfer(traffic: Traffic, links: JobLinks, overhead_s: float = 0.0) -> Transfer:
    fits = links.fits(traffic.collective)
    drag = links.drag[traffic.collective]
    if traffic.ways:  # what a spared rank only sends, or only receives, costs it half of what both do
        drag = tuple(part / 2 if spared else part for part, spared in zip(drag, links.spared, strict=True))
    return Transfer(
        latency_s=traffic.latency_s(fits) + overhead_s,
        busy_latency_s=traffic.busy_latency_s(fits) + overhead_s,
        seconds=traffic.flow_s(fits),
        drag=drag,
        way=traffic.way(fits),
    )


def compressed_buckets(
    workload: Workload,
    placement: Placement,
    links: JobLinks,
    setting: StepSetting,
    codecs: Sequence[Mapping[int, CodecTime]],
) -> tuple[tuple[BucketTransfers, ...], list[tuple[tuple[float, ...], ...]]]:
    """Compressed buckets, and for each role its own work before and after each transfer.

    Args:
        codecs: for each role the codec's times, by bits.
    """
    bits = setting.bits_of(workload)
    sizes = {p.name: p.tensor.numel for p in workload.parameters}
    overhead = max(fit.per_bucket_s for fit in links.fits("all_gather"))
    buckets: list[BucketTransfers] = []
    local: list[list[tuple[float, ...]]] = [[] for _ in codecs]
    # Repeated layers have like buckets, and roles of one kind of device share their times.
    spared = links.spared or (False,) * len(codecs)
    kinds = [(*map(id, codec.values()), idle) for codec, idle in zip(codecs, spared, strict=True)]
    ways: dict[object, tuple[Stages, tuple[Transfer, ...]]] = {}
    seconds: dict[object, tuple[float, ...]] = {}
    for index, bucket in enumerate(workload.buckets):
        numel = sum(sizes[name] for name in bucket.parameters)
        nbytes = sum(encoded_bytes(sizes[name], bits[name], setting.block) for name in bucket.parameters)
        values: dict[int, int] = {}
        for name in bucket.parameters:
            if bits[name]:
                values[bits[name]] = values.get(bits[name], 0) + sizes[name]
        like = numel, nbytes, tuple(values.items())
        if like not in ways:
            way = stages(setting.route or Route(), placement, numel, nbytes, block=setting.block)
            *first, last = way.traffic
            ways[like] = way, (*(_transfer(t, links) for t in first), _transfer(last, links, overhead))
        way, transfers = ways[like]
        buckets.append(BucketTransfers(name=f"bucket {index}", transfers=transfers))
        for role, codec, kind, idle in zip(local, codecs, kinds, spared, strict=True):
            if (like, kind) not in seconds:
                seconds[like, kind] = way.local_s(
                    _mixed(codec, values), links.inside, feedback=setting.error_feedback, spared=idle
                )
            role.append(seconds[like, kind])
    return tuple(buckets), [tuple(role) for role in local]


def _mixed(codec: Mapping[int, CodecTime], values: Mapping[int, int]) -> CodecTime:
    """The times of a bucket with so many values in each number of bits; uncompressed values are like the others."""
    if len(values) == 1:
        return codec[next(iter(values))]
    if not values:
        return next(iter(codec.values()))
    parts = [(codec[bits], count / sum(values.values())) for bits, count in values.items()]

    def mean(lines: Sequence[tuple[Line, float]]) -> Line:
        return Line(
            a=sum(line.a * part for line, part in lines), c=sum(line.c * part for line, part in lines)
        )

    return CodecTime(
        encode=mean([(one.encode, part) for one, part in parts]),
        decode=mean([(one.decode, part) for one, part in parts]),
        add=mean([(one.add, part) for one, part in parts]),
        feedback=mean([(one.feedback, part) for one, part in parts]),
    )


def idle_seconds(buckets: Sequence[BucketTransfers], local: Sequence[tuple[tuple[float, ...], ...]]) -> float:
    """Time of compressed buckets with nothing to compute: all of them are ready at once."""
    ready = ComputeSegment(name="", seconds=0.0, phase="backward", buckets=tuple(range(len(buckets))))
    roles = [RoleWork(name=str(index), segments=(ready,), local=work) for index, work in enumerate(local)]
    return replay(roles, buckets).step_s


def with_local(
    roles: Sequence[RoleWork], local: Sequence[tuple[tuple[float, ...], ...]]
) -> tuple[RoleWork, ...]:
    """The roles with their codec's work."""
    return tuple(replace(role, local=work) for role, work in zip(roles, local, strict=True))
