"""What a replay starts from: every role's compute stream and codec work, and every bucket's transfers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.predict.traffic import Way


Runs = list[tuple[float, tuple[int, ...], str, tuple[int, ...]]]
"""Stretches of a compute stream: seconds, the buckets that are complete at the end, the phase, and the buckets that
must have arrived before it starts."""


@dataclass(frozen=True, kw_only=True)
class ComputeSegment:
    """A piece of a rank's compute stream: one operator in one pass, or a cast before it."""

    name: str
    seconds: float
    """Time on the device, with nothing else running there."""

    phase: Literal["forward", "backward"]
    launch_s: float = 0.0
    """Time of the host to launch it. A device never runs ahead of its host."""

    buckets: tuple[int, ...] = ()
    """Gradient buckets that are complete when this ends."""

    waits: tuple[int, ...] = ()
    """Buckets that must have arrived before this starts, such as the gathered weights of FSDP2."""


class Stream(tuple[ComputeSegment, ...]):
    """A compute stream, with what replays ask about it: computed once for all of them."""

    @cached_property
    def runs(self) -> Runs:
        """See `compute_runs`."""
        return compute_runs(self)

    @cached_property
    def ready_s(self) -> list[float]:
        """When each bucket is complete, with the device to itself; and the end of the compute stream."""
        ready = [0.0] * (1 + sum(len(buckets) for _, buckets, _, _ in self.runs))
        now = 0.0
        for seconds, buckets, _, _ in self.runs:
            now += seconds
            for bucket in buckets:
                ready[bucket] = now
        return [*ready[:-1], now]

    @cached_property
    def filled(self) -> list[int]:
        """The buckets that it completes, in ascending order."""
        return sorted(bucket for segment in self for bucket in segment.buckets)


@dataclass(frozen=True, kw_only=True)
class RoleWork:
    """The work of identical ranks: same device, same share, same precisions."""

    name: str
    segments: tuple[ComputeSegment, ...]
    """Forward, then backward, in the order of the stream."""

    optimizer_s: float = 0.0
    """Time of the optimizer, after the last bucket is reduced."""

    local: tuple[tuple[float, ...], ...] = ()
    """For each bucket, the time of encoding, reducing and decoding: one number before each transfer and one
    after the last."""

    codec_part: float = 1.0
    """Fraction of the device that a codec stage can use: one thread of several, or all of a GPU."""

    ranks: int = 1

    @property
    def stream(self) -> Stream:
        """Its segments; those of a `Stream` are used in many replays."""
        return self.segments if isinstance(self.segments, Stream) else self._own_stream

    @cached_property
    def _own_stream(self) -> Stream:
        return Stream(self.segments)

    @property
    def runs(self) -> Runs:
        return self.stream.runs

    @property
    def ready_s(self) -> list[float]:
        return self.stream.ready_s


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective of one bucket, over all ranks."""

    latency_s: float
    """Before the bytes flow, while no rank computes; uses no device."""

    seconds: float
    """While the bytes flow, with the wire free and every rank available."""

    busy_latency_s: float = 0.0
    """The same while a rank computes; less than `latency_s` counts as that."""

    drag: tuple[float, ...] = ()
    """For each role, the fraction of its device that the transfer uses while it flows."""

    way: Way = "both"
    """What the slowest interface does: what it only sends does not slow down what it only receives."""


@dataclass(frozen=True, kw_only=True)
class BucketTransfers:
    """The collectives of one gradient bucket."""

    name: str
    transfers: tuple[Transfer, ...]


def compute_runs(segments: Sequence[ComputeSegment]) -> Runs:
    """The compute stream, split where a bucket becomes ready or is waited for, or the phase changes.

    The clocks of device and host advance together, so runs in which launching is the slower of the two last as
    long as the launching.
    """
    runs: Runs = []
    host = device = since = 0.0
    phase = segments[0].phase if segments else "forward"
    waits: tuple[int, ...] = ()
    for segment in segments:
        if segment.phase != phase or segment.waits:
            if device > since or waits:
                runs.append((device - since, (), phase, waits))
            phase, since, waits = segment.phase, device, segment.waits
        host += segment.launch_s
        device = max(device, host) + segment.seconds
        if segment.buckets:
            runs.append((device - since, segment.buckets, phase, waits))
            since, waits = device, ()
    if device > since or waits:
        runs.append((device - since, (), phase, waits))
    return runs


def check_inputs(roles: Sequence[RoleWork], buckets: Sequence[BucketTransfers]) -> None:
    for role in roles:
        named = role.stream.filled
        assert named == list(range(len(buckets))), f"role {role.name} fills buckets {named} of {len(buckets)}"
        assert not role.local or [len(x) for x in role.local] == [len(b.transfers) + 1 for b in buckets]
        assert 0 < role.codec_part <= 1
    for bucket in buckets:
        assert bucket.transfers, "a bucket travels at least once"
