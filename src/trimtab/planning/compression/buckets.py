"""How large DDP's buckets should be, by a pure function of measured times. `predict/` tells what each size costs.

A bucket is exchanged while the backward pass fills the next ones. Large buckets leave a long exchange after the last
gradient, and small ones pay the fixed time of a bucket more often.
"""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.predict.links import Fit
from trimtab.predict.replay.build import exposed_seconds
from trimtab.workload.buckets import DEFAULT_MB, FIRST_MB, MIB, ddp_buckets
from trimtab.workload.workload import Parameter

BUCKET_CAPS_MB = (1.0, 2.5, 5.0, 12.5, 50.0, 100.0)
"""Sizes of DDP's buckets that are tried beside the job's own."""

MOST_BUCKETS = 128
"""Sizes that make more buckets than this are not tried: each costs messages, and the last one hardly matters."""

PACES = (1.0, 1.5, 2.0)
"""The backward pass takes this many times as long as the exchange of all gradients: how long it takes is not known
before the first step. Where the link is slower, the size hardly matters, since something is always being sent."""

WORTHWHILE = 0.01
"""Another size than DDP's must shorten what is exposed by this fraction of the exchange."""


def caps_to_try(parameters: Sequence[Parameter]) -> list[float]:
    """The sizes, in MiB, that make no more than `MOST_BUCKETS` buckets; at least the largest."""
    whole = sum(p.tensor.nbytes for p in parameters if p.trainable) / MIB
    return [cap for cap in BUCKET_CAPS_MB if cap == BUCKET_CAPS_MB[-1] or whole <= MOST_BUCKETS * cap]


def bucket_cap_mb(parameters: Sequence[Parameter], bucket: Fit) -> float:
    """The size of buckets that leaves least of an exchange exposed, over all of `PACES`; DDP's where that gains little.

    Args:
        parameters: in the order in which their gradients become ready.
        bucket: the time of a bucket (`per_message_s`) and of a byte of its uncompressed values.
    """
    exchange_s = bucket.per_byte_s * sum(p.tensor.nbytes for p in parameters if p.trainable)

    def exposed(cap: float) -> float:
        buckets = [b.nbytes for b in ddp_buckets(parameters, (), cap, first_mb=min(FIRST_MB, cap))]
        return sum(exposed_seconds(buckets, bucket, pace * exchange_s) for pace in PACES) / len(PACES)

    times = {cap: exposed(cap) for cap in (DEFAULT_MB, *caps_to_try(parameters))}
    best = min(times, key=lambda cap: (times[cap], -cap))
    return best if times[DEFAULT_MB] - times[best] > WORTHWHILE * exchange_s else DEFAULT_MB
