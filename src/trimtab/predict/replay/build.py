"""Builds the roles and buckets of a replay from the times of operators, codec and links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trimtab.cluster.profile import CodecTime
from trimtab.predict.collectives import Placement, Route, Traffic, all_reduce, stages, tree_all_reduce
from trimtab.predict.links import JobLinks
from trimtab.predict.replay.inputs import BucketTransfers, ComputeSegment, RoleWork, Transfer
from trimtab.predict.replay.replay import replay
from trimtab.wire_format import MIN_NUMEL, encoded_bytes
from trimtab.workload import Workload


def bits_of(workload: Workload, bits: int | None) -> dict[str, int]:
    """Bits of every trainable parameter under `trimtab.compress(ddp, Block(bits=bits))`; 0 for uncompressed."""
    return {
        p.name: bits if bits and len(p.tensor.shape) > 1 and p.tensor.numel >= MIN_NUMEL else 0
        for p in workload.parameters
        if p.trainable
    }


def payloads(workload: Workload, bits: int) -> tuple[int, ...]:
    """Encoded bytes of every bucket."""
    sizes = {p.name: p.tensor.numel for p in workload.parameters}
    chosen = bits_of(workload, bits)
    return tuple(
        sum(encoded_bytes(sizes[name], chosen[name]) for name in bucket.parameters)
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


def plain_buckets(workload: Workload, placement: Placement, links: JobLinks) -> tuple[BucketTransfers, ...]:
    """Buckets that the backend all-reduces."""
    return tuple(
        BucketTransfers(name=f"bucket {i}", transfers=(plain_transfer(bucket.nbytes, placement, links),))
        for i, bucket in enumerate(workload.buckets)
    )


def plain_transfer(nbytes: int, placement: Placement, links: JobLinks) -> Transfer:
    """An all-reduce by the backend, on the faster of its ways."""
    ways = [all_reduce(nbytes, placement)]
    if links.trees:
        ways.append(tree_all_reduce(nbytes, placement))
    fits = links.fits("all_reduce")
    return _transfer(min(ways, key=lambda way: way.seconds(fits)), links)


def _transfer(traffic: Traffic, links: JobLinks, overhead_s: float = 0.0) -> Transfer:
    fits = links.fits(traffic.collective)
    return Transfer(
        latency_s=traffic.latency_s(fits) + overhead_s,
        seconds=traffic.flow_s(fits),
        drag=links.drag[traffic.collective],
    )


def compressed_buckets(
    workload: Workload,
    placement: Placement,
    links: JobLinks,
    bits: Mapping[str, int],
    codecs: Sequence[CodecTime],
    route: Route | None = None,
) -> tuple[tuple[BucketTransfers, ...], list[tuple[tuple[float, ...], ...]]]:
    """Compressed buckets, and for each role its own work before and after each transfer."""
    sizes = {p.name: p.tensor.numel for p in workload.parameters}
    overhead = max(fit.per_bucket_s for fit in links.fits("all_gather"))
    buckets: list[BucketTransfers] = []
    local: list[list[tuple[float, ...]]] = [[] for _ in codecs]
    for index, bucket in enumerate(workload.buckets):
        numel = sum(sizes[name] for name in bucket.parameters)
        nbytes = sum(encoded_bytes(sizes[name], bits[name]) for name in bucket.parameters)
        way = stages(route or Route(), placement, numel, nbytes)
        *first, last = way.traffic
        transfers = [_transfer(traffic, links) for traffic in first] + [_transfer(last, links, overhead)]
        buckets.append(BucketTransfers(name=f"bucket {index}", transfers=tuple(transfers)))
        # Roles of one kind of device share their times.
        seconds = {id(codec): way.local_s(codec, links.inside) for codec in codecs}
        for role, codec in zip(local, codecs, strict=True):
            role.append(seconds[id(codec)])
    return tuple(buckets), [tuple(role) for role in local]


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
