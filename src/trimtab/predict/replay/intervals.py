"""What a replay knows before it begins: stretches of computing, the order of buckets in each stage, fair parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.predict.replay.replay import Bucket, Role


def fair(demands: Sequence[float]) -> list[float]:
    """Share 1 among demands: each gets what it asks for while there is enough, else an equal part."""
    if sum(demands) <= 1.0:
        return list(demands)
    given = [0.0] * len(demands)
    left, waiting = 1.0, len(demands)
    for index in sorted(range(len(demands)), key=demands.__getitem__):
        given[index] = min(demands[index], left / waiting)
        left -= given[index]
        waiting -= 1
    return given


def queues(lengths: Sequence[int]) -> tuple[list[list[int | None]], list[list[int]]]:
    """For every bucket and stage, the next bucket that has this stage, and whether (1) there is one before it."""
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


def stretches(role: Role) -> list[tuple[float, tuple[int, ...], str]]:
    """The compute stream cut where a bucket becomes ready or the phase changes: (seconds, buckets, phase).

    The device's clock is carried along with the host's, so that stretches in which launching is the
    slower of the two last as long as the launching.
    """
    runs: list[tuple[float, tuple[int, ...], str]] = []
    host = device = since = 0.0
    phase = role.segments[0].phase if role.segments else "forward"
    for segment in role.segments:
        if segment.phase != phase:
            if device > since:
                runs.append((device - since, (), phase))
            phase, since = segment.phase, device
        host += segment.launch_s
        device = max(device, host) + segment.seconds
        if segment.buckets:
            runs.append((device - since, segment.buckets, phase))
            since = device
    if device > since:
        runs.append((device - since, (), phase))
    return runs


def check(roles: Sequence[Role], buckets: Sequence[Bucket]) -> None:
    for role in roles:
        named = sorted(b for segment in role.segments for b in segment.buckets)
        assert named == list(range(len(buckets))), f"role {role.name} fills buckets {named} of {len(buckets)}"
        assert not role.local or [len(x) for x in role.local] == [len(b.transfers) + 1 for b in buckets]
        assert 0 < role.codec_part <= 1
    for bucket in buckets:
        assert bucket.transfers, "a bucket travels at least once"
