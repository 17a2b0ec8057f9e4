"""Builds the roles and buckets of a replay from the times of operators, codec and links."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trimtab.errors import TrimtabError
from trimtab.predict.links import Collective, Fit, Placement, volume
from trimtab.predict.replay.inputs import BucketTransfers, ComputeSegment, RoleWork, Transfer
from trimtab.predict.replay.replay import replay
from trimtab.wire_format import MIN_NUMEL, TINY_BYTES, encoded_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.cluster.profile import CodecTime
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


def in_one_gather(nbytes: int, world: int) -> bool:
    """Whether a bucket of so many encoded bytes is all-gathered instead of scattered, reduced and gathered."""
    return world <= 2 or nbytes <= TINY_BYTES


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


def plain_buckets(
    workload: Workload, placement: Placement, fits: Mapping[Collective, Sequence[Fit]]
) -> tuple[BucketTransfers, ...]:
    """Buckets that the backend all-reduces; one fit for each role."""
    return tuple(
        BucketTransfers(
            name=f"bucket {i}", transfers=(transfer("all_reduce", bucket.nbytes, placement, fits),)
        )
        for i, bucket in enumerate(workload.buckets)
    )


def transfer(
    collective: Collective, nbytes: int, placement: Placement, fits: Mapping[Collective, Sequence[Fit]]
) -> Transfer:
    """One collective of so many bytes (see `volume`)."""
    if collective not in fits or not fits[collective]:
        raise TrimtabError(
            f"links: {collective} was not measured on this link; run `trimtab probe` under torchrun on the hosts "
            "it joins, or give the link class a rate in the cluster file"
        )
    of_roles = fits[collective]
    messages, sent = volume(collective, nbytes, placement)
    return Transfer(
        latency_s=messages * of_roles[0].per_message_s,
        seconds=sent * of_roles[0].per_byte_s,
        drag=tuple(fit.drag for fit in of_roles),
    )


def compressed_buckets(
    workload: Workload,
    placement: Placement,
    fits: Mapping[Collective, Sequence[Fit]],
    bits: Mapping[str, int],
    codecs: Sequence[CodecTime],
) -> tuple[tuple[BucketTransfers, ...], list[tuple[tuple[float, ...], ...]]]:
    """Compressed buckets, and for each role the codec's time before and after each transfer."""
    world = placement.world
    sizes = {p.name: p.tensor.numel for p in workload.parameters}
    buckets: list[BucketTransfers] = []
    local: list[list[tuple[float, ...]]] = [[] for _ in codecs]
    for index, bucket in enumerate(workload.buckets):
        numel = sum(sizes[name] for name in bucket.parameters)
        nbytes = sum(encoded_bytes(sizes[name], bits[name]) for name in bucket.parameters)
        name = f"bucket {index}"
        if in_one_gather(nbytes, world):
            buckets.append(
                BucketTransfers(name=name, transfers=(transfer("all_gather", nbytes, placement, fits),))
            )
            for role, codec in zip(local, codecs, strict=True):
                after = codec.decode.seconds(numel) + (world - 1) * codec.add.seconds(numel)
                role.append((codec.encode.seconds(numel), after))
            continue
        part = numel / world
        away = nbytes * (world - 1) // world
        buckets.append(
            BucketTransfers(
                name=name,
                transfers=(
                    transfer("all_to_all", away, placement, fits),
                    transfer("all_gather", -(-nbytes // world), placement, fits),
                ),
            )
        )
        for role, codec in zip(local, codecs, strict=True):
            owner = (
                (world - 1) * codec.add.seconds(part)
                + codec.encode.seconds(part)
                + codec.decode.seconds(part)
            )
            role.append((codec.encode.seconds(numel - part), owner, (world - 1) * codec.decode.seconds(part)))
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
