"""The stream of a tensor group in one step: what its ranks compute, where they meet, and the buckets beside it.

Formulas, with ranks i of a group that all start at 0 after a meeting:

- Forward: rank i computes a(i) until the next meeting. The all-reduce starts at A = max a(i) and takes
  t = latency + flow; nothing overlaps with it. On CPUs these are the times of transfers that start when ranks have
  just computed (`Fit.awaited`).
- Backward: a(i) lacks the weights' gradients of the block's projections, c(i). A rank computes these from a(i) on,
  while it waits for the others and while the input's gradient is summed (`sharding.overlap`); a flowing transfer
  takes the part d of its device. So rank i starts its next stretch
  o(i) = max(0, c(i) - (A - a(i)) - latency - (1 - d) flow) after the sum is there.
- c(i) is `LATE_PART` of the backward time of the block's projections: a linear layer's backward pass is two products
  of the same size.
- Buckets with weights of a block are complete when all of c(i) is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum

from trimtab.predict.replay.inputs import Transfer

FLOWING = 0.5
"""Rate of an all-reduce of activations while a bucket is sent over the same links, and of the bucket."""

LATE_PART = 0.5
"""Part of a projection's backward time that its weight's gradient takes."""

_DONE = 1e-12


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a group's stream: computing, waiting for a message, or sending."""

    kind: str
    seconds: float
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GroupStream:
    """One copy of the model on its ranks."""

    stream: tuple[Stretch, ...]
    compute_s: tuple[float, ...]
    optimizer_s: tuple[float, ...]

    @cached_property
    def stream_s(self) -> float:
        return fsum(part.seconds for part in self.stream)

    @cached_property
    def all_reduce_s(self) -> float:
        return fsum(part.seconds for part in self.stream if part.kind != "compute")


def forward_stream(passes: Sequence[Sequence[float]], meetings: Mapping[int, Transfer]) -> list[Stretch]:
    """Of each rank the operators' forward times; `meetings` are the sums after operators."""
    count, stream, since = len(passes[0]), [], []
    for index in range(count):
        since.append(index)
        if index in meetings or index == count - 1:
            stream.append(Stretch("compute", max(fsum(own[i] for i in since) for own in passes)))
            stream += _sent(meetings.get(index))
            since = []
    return stream


def backward_stream(
    passes: Sequence[Sequence[float]],
    meetings: Mapping[int, Transfer],
    projections: Mapping[int, Sequence[int]],
    ready: Mapping[int, tuple[int, ...]],
) -> list[Stretch]:
    """Of each rank the operators' backward times.

    Args:
        meetings: the sums after operators.
        projections: those of the block that each meeting is for.
        ready: the buckets that operators complete.
    """
    late = {index for meeting in meetings for index in projections[meeting]}
    own_s = [[s * (1 - LATE_PART) if i in late else s for i, s in enumerate(own)] for own in passes]
    stream: list[Stretch] = []
    ahead = [0.0] * len(passes)
    since: list[int] = []
    for index in range(len(passes[0]) - 1, -1, -1):
        since.append(index)
        if index not in meetings and index:
            continue
        arrivals = [o + fsum(own[i] for i in since) for o, own in zip(ahead, own_s, strict=True)]
        slowest = max(range(len(passes)), key=lambda rank: arrivals[rank])
        seconds = ahead[slowest]
        for each in since:
            seconds += own_s[slowest][each]
            if each in ready and each not in late:
                stream.append(Stretch("compute", max(0.0, seconds), ready[each]))
                seconds = min(0.0, seconds)
        stream.append(Stretch("compute", max(0.0, seconds)))
        since, ahead = [], [own - arrivals[slowest] for own in arrivals]
        if index not in meetings:
            continue
        sent = meetings[index]
        stream += _sent(sent)
        hidden = sent.latency_s + sent.seconds * (1 - max(sent.drag, default=0.0))
        block = projections[index]
        ahead = [
            max(0.0, LATE_PART * fsum(own[i] for i in block) + before - hidden)
            for own, before in zip(passes, ahead, strict=True)
        ]
        complete = tuple(bucket for i in sorted(block, reverse=True) for bucket in ready.get(i, ()))
        if complete:
            last = max(ahead)
            stream.append(Stretch("compute", last, complete))
            ahead = [own - last for own in ahead]
    if max(ahead) > 0:
        stream.append(Stretch("compute", max(ahead)))
    return [part for part in stream if part.seconds > 0 or part.buckets]


def _sent(transfer: Transfer | None) -> list[Stretch]:
    if transfer is None:
        return []
    return [Stretch("latency", transfer.latency_s), Stretch("flow", transfer.seconds)]


def run_streams(
    streams: Sequence[Sequence[Stretch]],
    buckets: Sequence[tuple[float, float]],
    drag: float,
    contended: bool,
) -> tuple[list[float], float]:
    """When each stream ends, and when the last bucket has been reduced.

    Args:
        buckets: latency and flow of each.
        drag: the part of a device that a flowing bucket takes.
        contended: whether activations and buckets use the same links.
    """
    now, exchanged = 0.0, 0.0
    at = [0] * len(streams)
    left = [stream[0].seconds for stream in streams]
    ends: list[float | None] = [None] * len(streams)
    ready = [0] * len(buckets)
    bucket, waiting, flowing = 0, 0.0, 0.0
    started = False
    while True:
        if not started and bucket < len(buckets) and ready[bucket] == len(streams):
            started, (waiting, flowing) = True, buckets[bucket]
        sending = started and waiting <= _DONE
        active = [i for i, end in enumerate(ends) if end is None]
        rates = {}
        for i in active:
            kind = streams[i][at[i]].kind
            slowed = (
                max(0.5, 1 - drag) if kind == "compute" else FLOWING if contended and kind == "flow" else 1.0
            )
            rates[i] = slowed if sending else 1.0
        meets = contended and any(streams[i][at[i]].kind == "flow" for i in active)
        rate = FLOWING if sending and meets else 1.0
        waits = [left[i] / rates[i] for i in active]
        if started:
            waits.append((flowing if sending else waiting) / rate)
        if not waits:
            return [end or 0.0 for end in ends], exchanged
        passed = min(waits)
        now += passed
        if started:
            if sending:
                flowing -= passed * rate
            else:
                waiting -= passed
            if flowing <= _DONE and waiting <= _DONE:
                started, bucket, exchanged = False, bucket + 1, now
        for i in active:
            left[i] -= passed * rates[i]
            while ends[i] is None and left[i] <= _DONE:
                for index in streams[i][at[i]].buckets:
                    ready[index] += 1
                at[i] += 1
                if at[i] == len(streams[i]):
                    ends[i] = now
                else:
                    left[i] = streams[i][at[i]].seconds
