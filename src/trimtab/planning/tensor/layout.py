"""Which ranks hold one copy of the model together, with what shares of its units and of the batch. Pure functions.

Within a group units follow speed, between groups batch shares follow the groups' speed. The ranks in the same place
of all groups hold the same units (DDP reduces them together), so one vector of shares serves all groups. Memory comes
first: a layout that does not fit is never returned.

The search: every way to form groups where there are few, else groups inside hosts, of like cards, and of unlike cards
in equal measure. Each starts from shares that level the ranks' times, and single steps of share and single samples
move as long as the predicted step becomes shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Literal

from trimtab.planning.shares.batch import share_batch
from trimtab.planning.tensor.shares import BlockSize, share_blocks, water_fill
from trimtab.predict.tensor import Precisions, TensorJob, TensorSetting, TensorStep

Groups = tuple[tuple[int, ...], ...]

FEW_RANKS = 8
"""Up to so many ranks every way to form groups is tried."""

MANY_RANKS = 64
"""Beyond so many only groups of 2, 4 and 8 neighbors are tried, and nothing is moved afterwards."""

LARGEST = 16
"""No tensor group has more ranks."""

FINENESS = 64
"""Resolution of shares: multiples of 1 / this."""

_PROMISING = 4
"""So many of the best starts are improved."""

_MOVES = 40
"""Rounds of single moves."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to run a job."""

    setting: TensorSetting
    shares: tuple[float, ...]
    """The part of every block's units, by place in a group."""

    step: TensorStep
    over: int = 0
    """By how many bytes ranks exceed their memory, one of each kind."""

    damage: float = 0.0
    """Of lowered projections."""

    @property
    def order(self) -> tuple[int, float]:
        return self.over, self.step.step_s


@dataclass(kw_only=True)
class LayoutSearch:
    """Searches the layouts of one model on one cluster."""

    job: TensorJob
    total: int
    """Samples of a step, over all groups."""

    limits: Mapping[str, int | None]
    """Memory by device class; None for no limit."""

    batch: Literal["fixed", "free"] = "free"
    _peaks: dict[object, int] = field(default_factory=dict)
    _paces: dict[str, float] = field(default_factory=dict)

    def sizes(self) -> list[int]:
        """Sizes of tensor groups that divide the ranks, and leave every rank a unit of every block."""
        world = len(self.job.ranks)
        most = min(LARGEST, self.total * world, *(span.units for span in self.job.measured.workload.units))
        candidates = range(2, min(world, most) + 1) if world <= MANY_RANKS else (2, 4, 8)
        return [
            size
            for size in candidates
            if world % size == 0
            and size <= most
            and world // size <= self.total
            and (self.batch == "free" or self.total % (world // size) == 0)
        ]

    def best(self, size: int, bits: Sequence[int | None] = (None,)) -> Layout | None:
        """The fastest layout with groups of this size; None if none fits."""
        starts = [
            self._start(groups, count)
            for groups in self.groupings(size)
            for count in (bits if len(groups) > 1 else (None,))
        ]
        starts.sort(key=lambda layout: layout.order)
        best = min(map(self.improved, starts[:_PROMISING]), key=lambda layout: layout.order)
        return None if best.over else best

    def sums_s(self, size: int) -> float:
        """Time to sum activations in the first ranks' group with an equal share of the batch: a step takes longer."""
        samples = max(1, self.total * size // len(self.job.ranks))
        setting = self._setting((tuple(range(size)),), [1 / size] * size, (samples,), None)
        return self.job.step(setting).all_reduce_s

    def bound_s(self, size: int) -> float:
        """About the shortest step of groups of neighbors: nothing is computed twice, nobody waits but for the sums."""
        world = len(self.job.ranks)
        samples = max(1, self.total * size // world)
        pace = {
            name: self.job.measured.mapper(name, self.job.cluster.devices[name].kind, samples).total_s
            / samples
            for name in dict.fromkeys(rank.device for rank in self.job.ranks)
        }
        summed = self.sums_s(size) / 2 / samples  # in backward weights' gradients may hide them
        rate = 0.0
        for first in range(0, world, size):
            together = sum(1 / pace[rank.device] for rank in self.job.ranks[first : first + size])
            rate += 1 / (1 / together + summed)
        return self.total / rate

    def groupings(self, size: int) -> list[Groups]:
        """Ways to form groups, each kind once; ranks are in ascending order, as in torch's groups."""
        ranks = range(len(self.job.ranks))
        ways = (
            list(_partitions(tuple(ranks), size)) if len(self.job.ranks) <= FEW_RANKS else self._likely(size)
        )
        kinds: dict[object, Groups] = {}
        for way in ways:
            groups = tuple(sorted(tuple(sorted(group)) for group in way))
            kinds.setdefault(tuple(sorted(str(self.job.kind(group, 0)) for group in groups)), groups)
        return list(kinds.values())

    def _likely(self, size: int) -> list[Groups]:
        """Inside hosts, of like cards, and of unlike cards in equal measure."""
        ranks = list(range(len(self.job.ranks)))
        if len(ranks) > MANY_RANKS:
            return [_consecutive(ranks, size)]
        hosts = self._hosts()
        order = [rank for host in hosts for rank in host]
        alike = sorted(order, key=self._pace)  # cards of one host stay neighbors
        ways = [_mixed(alike, size), *(_consecutive(each, size) for each in (ranks, order, alike))]
        for within in (hosts, [host[::-1] for host in hosts]):  # the slowest, or the fastest, are left over
            whole = [host[: len(host) // size * size] for host in within]
            left = [rank for host, own in zip(within, whole, strict=True) for rank in host[len(own) :]]
            for divided in (_consecutive, _mixed):
                inside = [group for own in whole if own for group in divided(own, size)]
                for rest in (left, sorted(left, key=self._pace)):
                    ways.append((*inside, *_consecutive(rest, size)))
        return ways

    def _hosts(self) -> list[list[int]]:
        """The ranks of each host, the fastest first; hosts in an order that does not depend on the cluster file's."""
        by_host: dict[str, list[int]] = {}
        for rank in range(len(self.job.ranks)):
            by_host.setdefault(self.job.ranks[rank].host, []).append(rank)
        hosts = [sorted(own, key=self._pace) for own in by_host.values()]
        return sorted(hosts, key=lambda own: (self.job.link_of(own[0]), [self._pace(rank) for rank in own]))

    def _pace(self, rank: int) -> float:
        device = self.job.ranks[rank].device
        if device not in self._paces:
            samples = max(1, self.total // len(self.job.ranks))
            self._paces[device] = self.job.share_times((device,), samples)[0].whole
        return self._paces[device]

    def at(
        self,
        groups: Groups,
        shares: Sequence[float],
        samples: Sequence[int],
        bits: int | None,
        precisions: tuple[tuple[Precisions, ...], ...] = (),
    ) -> Layout:
        """The layout with these shares, predicted."""
        setting = replace(self._setting(groups, shares, samples, bits), precisions=precisions)
        counts = setting.counts
        seen, over = set(), 0
        for index, (group, own) in enumerate(zip(groups, samples, strict=True)):
            low = setting.of_group(index)
            for place, rank in enumerate(group):
                device = self.job.ranks[rank].device
                limit = self.limits[device]
                if limit is not None and (device, place, own, id(low)) not in seen:
                    seen.add((device, place, own, id(low)))
                    peak = self.peak(device, counts[place], own, len(groups), bits, low[place])
                    over += max(0, peak - limit)
        return Layout(setting=setting, shares=tuple(shares), step=self.job.step(setting), over=over)

    def _setting(
        self, groups: Groups, shares: Sequence[float], samples: Sequence[int], bits: int | None
    ) -> TensorSetting:
        blocks = {
            span.name: BlockSize(units=span.units, unit_bytes=1) for span in self.job.measured.workload.units
        }
        by_block = share_blocks(blocks, shares)
        counts = tuple({name: own[place] for name, own in by_block.items()} for place in range(len(shares)))
        return TensorSetting(groups=groups, counts=counts, samples=tuple(samples), bits=bits)

    def peak(
        self,
        device: str,
        counts: Mapping[str, int],
        samples: int,
        groups: int,
        bits: int | None,
        precisions: Precisions | None = None,
    ) -> int:
        """Bytes that a rank needs."""
        low = tuple(sorted((precisions or {}).items()))
        key = device, tuple(counts.values()), samples, groups, bits, low
        if key not in self._peaks:
            self._peaks[key] = self.job.memory(device, counts, samples, groups, bits, precisions)
        return self._peaks[key]

    def _start(self, groups: Groups, bits: int | None) -> Layout:
        """Shares that level the times of the slowest ranks in each place, and samples that level the groups'."""
        samples = even_samples(self.total, len(groups))
        size = len(groups[0])
        kinds = {tuple(self.job.ranks[rank].device for rank in group) for group in groups}
        times = [self.job.share_times(kind, max(samples)) for kind in kinds]
        level = water_fill(
            FINENESS,
            [max(own[place].whole for own in times) / FINENESS for place in range(size)],
            fixed=[max(own[place].fixed for own in times) for place in range(size)],
        )
        # Every rank keeps something: without a unit it would only wait.
        shares = [max(1, count) / FINENESS for count in level.counts]
        first = self.at(groups, _normal(shares), self._shared(groups, _normal(shares), samples, bits), bits)
        equal = [1 / size] * size
        second = self.at(groups, equal, self._shared(groups, equal, samples, bits), bits)
        return min(first, second, key=lambda layout: layout.order)

    def _shared(
        self, groups: Groups, shares: Sequence[float], even: Sequence[int], bits: int | None
    ) -> tuple[int, ...]:
        """Samples by group: equal, or so that all groups finish together."""
        if self.batch == "fixed" or len(groups) == 1:
            return tuple(even)
        lines: dict[object, tuple[float, float]] = {}
        few, many = max(1, max(even) // 2), max(2, max(even))
        keys = [self.job.kind(group, 0) for group in groups]
        for key, group in zip(keys, groups, strict=True):
            if key not in lines:
                ends = [
                    self.job.step(self._setting((group,), shares, (n,), None)).step_s for n in (few, many)
                ]
                slope = max(1e-12, (ends[1] - ends[0]) / (many - few))
                lines[key] = slope, max(0.0, ends[0] - slope * few)
        return share_batch(self.total, [lines[key][0] for key in keys], fixed=[lines[key][1] for key in keys])

    def improved(self, layout: Layout, within: Callable[[Layout], bool] = lambda layout: True) -> Layout:
        """Move single steps of share and single samples as long as that helps; never to a layout not `within`."""
        if len(self.job.ranks) > MANY_RANKS:
            return layout
        for _ in range(_MOVES):
            others = filter(within, self._neighbors(layout))
            better = min(others, key=lambda other: other.order, default=layout)
            if better.order >= layout.order:
                return layout
            layout = better
        return layout

    def _neighbors(self, layout: Layout) -> Iterator[Layout]:
        setting = layout.setting
        places = range(len(layout.shares))
        for giver in places:
            for taker in places:
                for step in (1, 4):
                    shares = list(layout.shares)
                    shares[giver] -= step / FINENESS
                    shares[taker] += step / FINENESS
                    if giver != taker and shares[giver] > 0.5 / FINENESS:
                        yield self.at(
                            setting.groups, shares, setting.samples, setting.bits, setting.precisions
                        )
        if self.batch == "fixed":
            return
        kinds: dict[object, int] = {}
        for index, (group, own) in enumerate(zip(setting.groups, setting.samples, strict=True)):
            kinds.setdefault(self.job.kind(group, own), index)
        for giver in kinds.values():
            for taker in kinds.values():
                samples = list(setting.samples)
                samples[giver] -= 1
                samples[taker] += 1
                if giver != taker and samples[giver] > 0:
                    yield self.at(setting.groups, layout.shares, samples, setting.bits, setting.precisions)


def _consecutive(order: Sequence[int], size: int) -> Groups:
    """Groups of ranks that follow each other."""
    return tuple(tuple(order[i : i + size]) for i in range(0, len(order), size))


def _mixed(order: Sequence[int], size: int) -> Groups:
    """Groups of ranks from all over an order."""
    count = len(order) // size
    return tuple(tuple(order[i::count]) for i in range(count))


def _partitions(ranks: tuple[int, ...], size: int) -> Iterator[Groups]:
    """Every way to divide ranks into groups of one size."""
    if not ranks:
        yield ()
        return
    for others in combinations(ranks[1:], size - 1):
        group = (ranks[0], *others)
        rest = tuple(rank for rank in ranks if rank not in group)
        for way in _partitions(rest, size):
            yield (group, *way)


def even_samples(total: int, parts: int) -> tuple[int, ...]:
    """A batch divided among so many groups, in numbers that differ by one at most."""
    each, more = divmod(total, parts)
    return tuple(each + (index < more) for index in range(parts))


def _normal(shares: Sequence[float]) -> tuple[float, ...]:
    whole = sum(shares)
    return tuple(share / whole for share in shares)
