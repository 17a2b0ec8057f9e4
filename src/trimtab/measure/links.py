"""Measure the link of a job: latency and bandwidth of each collective, and the compute time a transfer costs.

Collective: every rank of the group calls these at the same point, and every rank gets the same numbers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean, median

import torch
import torch.distributed as dist

from trimtab._compat import all_gather_single
from trimtab.cluster.profile import CollectiveTime
from trimtab.collectives import duplex
from trimtab.collectives.reduction import started
from trimtab.measure.timing import meet, seconds_per_call, slowest_seconds, stream_seconds, synchronize
from trimtab.predict.collectives import COLLECTIVES, TRAFFIC, Collective, Placement
from trimtab.predict.links import Fit, fit
from trimtab.predict.replay.build import payloads
from trimtab.predict.step_setting import StepSetting
from trimtab.workload import Workload

Rows = Sequence[Sequence[int]]

ROWS: Rows = ((1 << 16,) * 4, (1 << 20,) * 2, (1 << 23,) * 2)
"""For each trial, the bytes of its transfers."""

AWAITED_BYTES = (1 << 17, 1 << 20)
"""Of single transfers that start after computing."""

AWAITED, COMPUTED_S = 4, 0.006
"""Trials of transfers after computing in a round, unless told otherwise, and by how many seconds the times of computing
differ at most."""

SMALL_ROW = (1 << 14,) * 8
"""Small transfers, which show the cost of a message."""


def own_rows(
    workload: Workload, bits: Sequence[int], most: int | None = None
) -> dict[Collective, list[tuple[int, ...]]]:
    """Trial transfers: a job's own buckets, uncompressed and encoded, and small ones.

    Args:
        most: bytes of the uncompressed buckets to send, for links that would take too long with all.
    """
    count = buckets_within(workload, most)
    rows: dict[Collective, list[tuple[int, ...]]] = {
        "all_reduce": [SMALL_ROW, tuple(bucket.nbytes for bucket in workload.buckets[:count])]
    }
    if bits:
        encoded = [tuple(payloads(workload, StepSetting(bits=b))[:count]) for b in bits]
        rows["all_gather"] = [SMALL_ROW, *encoded]
        rows["all_to_all"] = [SMALL_ROW, *encoded]
    return rows


def buckets_within(workload: Workload, most: int | None) -> int:
    """How many of a workload's buckets fit into so many bytes; at least one."""
    count, total = 0, 0
    for bucket in workload.buckets:
        total += bucket.nbytes
        if most is not None and count and total > most:
            break
        count += 1
    return count


def link_times(probe: LinkProbe, devices: Sequence[str]) -> dict[str, CollectiveTime]:
    """The link's times as a profile stores them; `devices` are the classes of the ranks."""
    return {
        collective: CollectiveTime(
            per_message_s=fits[0].per_message_s,
            per_byte_s=fits[0].per_byte_s,
            busy_message_s=fits[0].busy_message_s,
            awaited_message_s=fits[0].awaited_message_s,
            awaited_byte_s=fits[0].awaited_byte_s,
            drag={name: fit.drag for name, fit in zip(devices, fits, strict=True)},
        )
        for collective, fits in probe.fits().items()
    }


class LinkProbe:
    """Times trial transfers of one group in rounds; the fits can be read after any round.

    A trial is a row of transfers that start without waiting for each other, like a job's buckets: the next one
    is running when one ends.
    """

    def __init__(
        self,
        placement: Placement,
        device: torch.device,
        *,
        group: dist.ProcessGroup | None = None,
        rows: Rows | Mapping[Collective, Rows] = ROWS,
        collectives: Sequence[Collective] = COLLECTIVES,
        awaited: Sequence[int] | Mapping[Collective, Sequence[int]] = AWAITED_BYTES,
        trials: int = AWAITED,
        slowness: Mapping[str, float] | None = None,
    ) -> None:
        """
        Args:
            rows: the bytes of each trial's transfers; predictions are best for the job's own.
            awaited: bytes of single transfers that start after computing (CPU).
            trials: of each of them in a round. A pause of a CPU quota takes as long as a small transfer, so a step with
                many of them needs the mean of many.
            slowness: by link class, how many times slower it is than the one whose rates are measured; 1 by default.
        """
        self._placement, self._device, self._group = placement, device, group
        self._slowness = [(slowness or {}).get(one.link, 1.0) for one in placement.classes]
        self._world_size, self._awaited_count = dist.get_world_size(group), trials
        self._collectives = tuple(collectives)
        self._rows: dict[Collective, list[tuple[int, ...]]] = {
            c: sorted(map(tuple, rows[c] if isinstance(rows, Mapping) else rows), key=sum)
            for c in collectives
        }
        self._times: dict[tuple[Collective, tuple[int, ...]], list[float]] = {}
        self._drags: dict[Collective, list[list[float]]] = {c: [] for c in collectives}
        self._busy: dict[Collective, list[float]] = {c: [] for c in collectives}
        self._awaited: dict[tuple[Collective, int], list[float]] = {}
        self._unit = _Unit(device)
        self._trials = {(c, row): self._row(c, row) for c in self._collectives for row in self._rows[c]}
        self._awaited_trials = {
            (c, size): self._row(c, (size,))
            for c in (self._collectives if device.type == "cpu" else ())
            for size in (awaited.get(c, ()) if isinstance(awaited, Mapping) else awaited)
        }

    def round(self) -> None:
        """Time every trial of every collective once, the smallest and the largest one also during a computation."""
        for key, run in self._trials.items():
            self._times.setdefault(key, []).append(
                slowest_seconds(partial(_complete, run), self._device, self._group)
            )
        for collective in self._collectives:
            rows = self._rows[collective]
            alone = self._unit.seconds()
            _, lost = self._beside_compute(self._trials[collective, rows[-1]], alone)
            self._drags[collective].append(lost)
            if self._device.type == "cpu":  # a GPU's host has nothing else to do than to pass on messages
                taken, _ = self._beside_compute(self._trials[collective, rows[0]], alone)
                self._busy[collective].append(max(taken))
        for (collective, size), run in self._awaited_trials.items():
            self._awaited.setdefault((collective, size), []).extend(
                self._after_compute(run, part / self._awaited_count) for part in range(self._awaited_count)
            )

    def fits(self) -> dict[Collective, tuple[Fit, ...]]:
        """For each collective a fit per rank; they differ only in drag."""
        fits: dict[Collective, tuple[Fit, ...]] = {}
        for collective in self._collectives:
            points = []
            for row in self._rows[collective]:
                traffic = [TRAFFIC[collective](size, self._placement) for size in row]
                messages = sum(t.messages for t in traffic)
                sent = sum(
                    max(n * slower for n, slower in zip(t.nbytes, self._slowness, strict=True))
                    for t in traffic
                )
                points.append((messages, sent, median(self._times[collective, row])))
            largest_s = points[-1][2]
            busy = self._busy_message_s(collective, points)
            awaited = self._awaited_fit(collective)
            fits[collective] = tuple(
                replace(
                    fit(points, drag=max(0.0, median(lost) / largest_s)),
                    busy_message_s=busy,
                    awaited_message_s=awaited.per_message_s,
                    awaited_byte_s=awaited.per_byte_s,
                )
                for lost in zip(*self._drags[collective], strict=True)
            )
        return fits

    def _awaited_fit(self, collective: Collective) -> Fit:
        """Of single transfers after computing. Their pauses add up over a step, so means count."""
        points = []
        for (name, size), seconds in self._awaited.items():
            if name == collective:
                traffic = TRAFFIC[collective](size, self._placement)
                sent = max(n * slower for n, slower in zip(traffic.nbytes, self._slowness, strict=True))
                points.append((traffic.messages, sent, mean(seconds)))
        return fit(points) if len(points) > 1 else Fit(per_message_s=0.0, per_byte_s=0.0)

    def _busy_message_s(self, collective: Collective, points: Sequence[tuple[float, float, float]]) -> float:
        """Seconds of a message while the ranks compute: those of the smallest trial, without its bytes."""
        messages, sent, _ = points[0]
        if not self._busy[collective] or not messages:
            return 0.0
        flow_s = fit(points).per_byte_s * sent
        return max(0.0, median(self._busy[collective]) - flow_s) / messages

    def _row(self, collective: Collective, row: Sequence[int]) -> Callable[[], list[dist.Work]]:
        transfers = [self._make(collective, size) for size in row]
        return lambda: [transfer() for transfer in transfers]

    def _make(self, collective: Collective, nbytes: int) -> Callable[[], dist.Work]:
        device, group, world = self._device, self._group, self._world_size
        of: dist.ProcessGroup = group or dist.group.WORLD  # type: ignore[assignment]
        if collective == "all_reduce":
            values = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
            return lambda: started(dist.all_reduce(values, group=group, async_op=True))
        if collective == "all_gather":
            mine = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            everyone = torch.zeros(nbytes * world, dtype=torch.uint8, device=device)
            return lambda: duplex.all_gather(everyone, mine, of)
        # A rank sends nothing to itself, as in the reductions.
        parts = [0 if r == dist.get_rank(group) else nbytes // max(1, world - 1) for r in range(world)]
        sent, got = (torch.zeros(sum(parts), dtype=torch.uint8, device=device) for _ in range(2))
        return lambda: duplex.all_to_all(got, sent, parts, parts, of)

    def _beside_compute(
        self, run: Callable[[], list[dist.Work]], alone: float
    ) -> tuple[list[float], list[float]]:
        """For each rank, how long the transfers take while it computes, and the seconds that computing loses.

        Args:
            alone: seconds of a unit of computation without them.
        """
        meet(self._device, self._group)
        start = time.perf_counter()
        if self._device.type == "cuda":
            lost = self._unit.lost_to(run, alone)
            taken = 0.0
        else:
            waiting = threading.Thread(
                target=_complete, args=(run,)
            )  # sends do not say when they are complete
            waiting.start()
            units = 0
            while waiting.is_alive():
                self._unit.run()
                units += 1
            taken = time.perf_counter() - start
            lost = taken - units * alone
            waiting.join()
        mine = torch.tensor([taken, lost], dtype=torch.float64, device=self._device)
        everyone = torch.empty(2 * self._world_size, dtype=torch.float64, device=self._device)
        of: dist.ProcessGroup = self._group or dist.group.WORLD  # type: ignore[assignment]
        all_gather_single(everyone, mine, of)
        values = everyone.tolist()
        return values[0::2], values[1::2]

    def _after_compute(self, run: Callable[[], list[dist.Work]], part: float) -> float:
        """How long the transfers take the rank that comes to them last, when all have computed until then.

        Args:
            part: of a period of computing, by which this one is longer than another: quotas have periods, too.
        """
        meet(self._device, self._group)
        end = time.perf_counter() + COMPUTED_S * (2 + part)
        while time.perf_counter() < end:
            self._unit.run()
        start = time.perf_counter()
        _complete(run)
        taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(taken, op=dist.ReduceOp.MIN, group=self._group)
        return float(taken)


def _complete(run: Callable[[], list[dist.Work]]) -> None:
    for work in run():
        work.wait()


class _Unit:
    """A short computation of known length, to measure what runs at the same time."""

    SECONDS = 0.06

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda = device.type == "cuda"
        rows, side, dtype = (4096, 4096, torch.bfloat16) if cuda else (64, 384, torch.float32)
        # A step is as much memory traffic as arithmetic, and a transfer disturbs the traffic more: on a CPU it also
        # evicts the weights, which a small matrix would keep in the cache.
        self._weights = torch.randn(1 if cuda else 24, side, side, device=device, dtype=dtype).unbind()
        self._a = torch.randn(rows, side, device=device, dtype=dtype)
        self._out = torch.empty_like(self._a)
        self._traffic = torch.zeros(1 << 26, device=device, dtype=dtype) if cuda else None
        self._runs = 0

    def run(self) -> None:
        torch.mm(self._a, self._weights[self._runs % len(self._weights)], out=self._out)
        self._runs += 1
        if self._traffic is not None:
            self._traffic.mul_(0.5)

    def seconds(self) -> float:
        """One unit on an otherwise idle device, over long enough that a CPU quota counts in full."""
        return seconds_per_call(self.run, self._device, at_least_s=self.SECONDS, gpu_calls=64, warmup=3)

    def lost_to(self, run: Callable[[], list[dist.Work]], alone: float) -> float:
        """How much longer a long row of units takes while the transfers run (CUDA)."""
        start = time.perf_counter()
        _complete(run)
        synchronize(self._device)
        units = max(1, round(1.5 * (time.perf_counter() - start) / alone))
        works = run()
        taken = stream_seconds(self.run, units)
        for work in works:
            work.wait()
        synchronize(self._device)
        return taken - units * alone
