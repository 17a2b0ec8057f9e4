"""Measure compressed buckets as a job runs them: encoded, sent and decoded in a pipeline.

Encoding, transfers and decoding of different buckets should overlap. How well they do depends on the device: a
GPU with few hardware queues runs them in turn. The time of a row of buckets beyond that of link and codec is
kept as an overhead of each bucket. Collective: every rank calls these at the same point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from trimtab.cluster.profile import LOCAL, Profile
from trimtab.codec import Block
from trimtab.collectives import Piece, Reduction, reduction_for, runner_for
from trimtab.doors.ddp import stage_groups
from trimtab.measure.links import buckets_within
from trimtab.measure.timing import slowest_seconds
from trimtab.predict.collectives import Placement
from trimtab.predict.links import JobLinks
from trimtab.predict.replay.build import compressed_buckets, idle_seconds
from trimtab.predict.step import codec_time, measured_rates
from trimtab.predict.step_setting import StepSetting
from trimtab.workload import Workload

BLOCK = 1024


class ReductionProbe:
    """Times the buckets of a workload at a number of bits, without computation at the same time."""

    def __init__(
        self, workload: Workload, bits: int, device: torch.device, groups: Sequence[dist.ProcessGroup]
    ) -> None:
        """`groups` are those of `stage_groups`."""
        self._device = device
        self._runner = runner_for(device)
        self._times: list[float] = []
        tensors = {p.name: p.tensor for p in workload.parameters}
        chosen = StepSetting(bits=bits).bits_of(workload)
        self._row: list[tuple[Reduction, torch.Tensor]] = []
        for bucket in workload.buckets:
            pieces, offset = [], 0
            for name in bucket.parameters:
                numel = tensors[name].numel
                piece = Piece(name=name, offset=offset, numel=numel, bits=chosen[name], block=BLOCK)
                pieces.append((piece, torch.Size(tensors[name].shape)))
                offset += numel
            reduction = reduction_for(pieces, torch.float32, device, tuple(groups), Block(bits=bits), seed=0)
            self._row.append((reduction, torch.zeros(offset, dtype=torch.float32, device=device)))
        self._run()

    def round(self) -> None:
        """Time all buckets once, until the slowest rank has finished."""
        self._times.append(slowest_seconds(self._run, self._device))

    @property
    def seconds(self) -> float:
        """Of all buckets: the median of the rounds."""
        return median(self._times)

    def close(self) -> None:
        self._runner.close()
        self._row.clear()

    def _run(self) -> None:
        futures: list[Any] = [
            self._runner.submit(reduction.steps(flat, step=0, scale=1.0), flat)
            for reduction, flat in self._row
        ]
        for future in futures:
            future.wait()


class ReductionOverhead:
    """The time of each compressed bucket beyond link and codec; it can be read after any round."""

    def __init__(
        self,
        workload: Workload,
        bits: Sequence[int],
        placement: Placement,
        device: torch.device,
        *,
        most: int | None = None,
    ) -> None:
        """
        Args:
            most: bytes of the uncompressed buckets to send, for links that would take too long with all.
        """
        self._workload = replace(workload, buckets=workload.buckets[: buckets_within(workload, most)])
        self._placement = placement
        group = dist.group.WORLD
        assert group is not None
        groups = stage_groups(group, device)
        self._rows = {b: ReductionProbe(self._workload, b, device, groups) for b in bits}

    def round(self) -> None:
        for row in self._rows.values():
            row.round()

    def seconds(self, profile: Profile, link: str, names: Sequence[str]) -> float:
        """Seconds per bucket, never negative; `names` are the device classes of the ranks."""
        links = _links(profile, link, names, self._placement)
        overheads = []
        for bits, row in self._rows.items():
            buckets, local = compressed_buckets(
                self._workload,
                self._placement,
                links,
                StepSetting(bits=bits),
                [{bits: codec_time(profile, name, bits)} for name in names],
            )
            overheads.append((row.seconds - idle_seconds(buckets, local)) / len(buckets))
        return max(0.0, mean(overheads))

    def close(self) -> None:
        """Stop the threads. The groups are kept until the default group is destroyed.

        If they were destroyed, torch would reuse their names for the next groups, which would then find stale
        addresses in the store.
        """
        for row in self._rows.values():
            row.close()


def with_overhead(profile: Profile, link: str, seconds: float) -> Profile:
    """The profile with this overhead for each compressed bucket."""
    collectives = profile.links[link]
    slower = replace(collectives["all_gather"], per_bucket_s=seconds)
    return replace(profile, links={**profile.links, link: {**collectives, "all_gather": slower}})


def _links(profile: Profile, link: str, names: Sequence[str], placement: Placement) -> JobLinks:
    rates = measured_rates(profile, link)
    times = profile.links[link]
    of_class = [
        measured_rates(profile, one.link if one.link in profile.links and one.link != LOCAL else link)
        for one in placement.classes
    ]
    return JobLinks(
        between={collective: tuple(own[collective] for own in of_class) for collective in rates},
        inside={},
        drag={c: tuple(times[c].drag.get(name, 0.0) for name in names) for c in rates},
    )
