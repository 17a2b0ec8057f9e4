"""Trade-offs of each device class at each share, from the profile of the cluster."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from copy import copy
from math import fsum

from trimtab.cluster import Cluster
from trimtab.planning.precision.options import Option, Options
from trimtab.planning.precision.tradeoffs import RankMenu, Tradeoffs
from trimtab.precision_names import OWN
from trimtab.predict.operators.costs import key_of, workload_key
from trimtab.predict.operators.measured_precisions import MeasuredPrecisions
from trimtab.predict.replayed_job import needed_bytes, ranks_in_memory
from trimtab.predict.step import rank_counts
from trimtab.predict.step_setting import StepSetting

EVERY = 16
"""Up to this many samples costs are looked up for each share; above, in steps of a fifth, with linear interpolation."""


class ProfileTradeoffs(Tradeoffs):
    """Trade-offs of the device classes of a cluster, from its profile."""

    def __init__(
        self,
        measured: MeasuredPrecisions,
        cluster: Cluster,
        damages: Mapping[str, Mapping[str, float]],
        total: int,
        setting: StepSetting = StepSetting(),  # noqa: B008  # frozen
    ) -> None:
        """
        Args:
            damages: by operator and precision, for a rank that computes the whole batch.
            total: samples of a whole micro-batch, over all ranks.
            setting: menus are for a step of its `accumulate` micro-batches.
        """
        self.measured, self.cluster, self.damages, self.total = measured, cluster, damages, total
        self.setting = StepSetting()

        limits = {
            name: None if device.memory_gib is None else int(device.memory_gib * 2**30)
            for name, device in cluster.devices.items()
        }
        super().__init__(limits)
        self._peaks: dict[object, int] = {}
        for name in rank_counts(cluster):
            # A batch that did not fit when it was probed tells how much memory there is at most.
            samples = measured.operators.device(name).too_large.get(workload_key(measured.operators.workload))
            if samples is not None:
                below, limit = self.peak(name, samples, {}) - 1, self.limits[name]
                self.limits[name] = below if limit is None else min(limit, below)
        self.setting = setting
        """May change, but for `accumulate`: the codec needs memory."""

    def on(self, cluster: Cluster) -> ProfileTradeoffs:
        """Those of the same device classes in another cluster; what was looked up is shared."""
        other = copy(self)
        other.cluster, other._peaks = cluster, {}
        return other

    def _menu(self, device: str, samples: int) -> RankMenu:
        low, high = self._around(device, samples)
        return self._looked_up(device, samples) if low == high else self._between(device, samples, low, high)

    def _plain_s(self, device: str, samples: int) -> float:
        low, high = self._around(device, samples)
        if low == high or (device, samples) in self._menus:
            return super()._plain_s(device, samples)
        # The search for shares asks about many numbers of samples and needs no options for them.
        return _mixed(
            self.menu(device, low).own_s, self.menu(device, high).own_s, (samples - low) / (high - low)
        )

    def _around(self, device: str, samples: int) -> tuple[int, int]:
        """The sizes from whose menus that of `samples` follows; both are `samples` where it is looked up."""
        key = workload_key(self.measured.operators.workload)
        sizes = sorted(self.measured.operators.device(device).batches.get(key, ()))
        if self.limits[device] is not None or len(sizes) < 2:
            return _around(samples)  # memory is not linear in the samples
        # Times are, between two measured sizes and beyond them; below the smallest no time is negative.
        knots = [*range(1, sizes[0]), *sizes, 2 * sizes[-1]]
        place = min(bisect_left(knots, samples), len(knots) - 1)
        return (samples, samples) if knots[place] == samples else (knots[place - 1], knots[place])

    # Memory

    def peak(self, device: str, samples: int, chosen: Mapping[str, str]) -> int:
        """Peak memory of a rank in bytes."""
        lowered = tuple(sorted((name, p) for name, p in chosen.items() if p != OWN))
        kind, results = self.cluster.devices[device].kind, self.measured.operators.results(device)
        key = (kind, results, samples, self.setting.bits, self.setting.block, self.setting.sharding, lowered)
        if key not in self._peaks:
            self._peaks[key] = needed_bytes(
                self.measured.operators.at(samples),
                dict(lowered),
                kind,
                ranks_in_memory(self.cluster, self.setting),
                self.setting,
                results,
            )
        return self._peaks[key]

    # From measurements

    def _looked_up(self, device: str, samples: int) -> RankMenu:
        measured, weight = self.measured, (samples / self.total) ** 2
        mapper = measured.mapper(device, samples, self.cluster.devices[device].kind)
        workload, times = mapper.workload, self.setting.accumulate
        whole = times * mapper.total_s
        offered = {
            name: tuple(p for p in several if p in self.damages.get(name, {}))
            for name, several in measured.precisions(device, samples).items()
        }
        saved = self._saved(device, samples, offered)
        options: Options = {}
        of_key: dict[object, dict[str, float]] = {}
        for name, indices in workload.settings.items():
            choices = offered[name]
            if not choices:
                continue
            operator_key: object = (tuple(key_of(workload.operators[i]) for i in indices), choices)
            if mapper.graph.results == "own":
                operator_key = name  # what it hands on changes what its neighbors take
            if operator_key not in of_key:
                own = fsum(mapper.forward_s[i] + mapper.backward_s[i] for i in indices)
                figures = {OWN: own}
                for precision in choices:
                    change = mapper.change(name, precision)
                    figures[precision] = max(0.0, own + change.delta_s)
                    mapper.undo(change)
                of_key[operator_key] = {precision: times * s for precision, s in figures.items()}
            options[name] = tuple(
                Option(
                    precision=precision,
                    seconds=seconds,
                    damage=0.0 if precision == OWN else self.damages[name][precision] * weight,
                    memory=-saved.get((name, precision), 0),
                )
                for precision, seconds in of_key[operator_key].items()
            )
        own = fsum(several[0].seconds for several in options.values())
        return RankMenu(base_s=max(0.0, whole - own), own_s=whole, options=options)

    def _saved(
        self, device: str, samples: int, offered: Mapping[str, tuple[str, ...]]
    ) -> dict[tuple[str, str], int]:
        """By operator and precision, its part of the memory saved when all operators have that precision.

        A single operator need not change the peak, which may be elsewhere; together they do. The saving is divided
        in proportion to the size of inputs, which is what operators save. Empty when there is no memory limit.
        """
        savings: dict[tuple[str, str], int] = {}
        if self.limits[device] is None:
            return savings
        workload = self.measured.operators.at(samples)
        for precision in dict.fromkeys(p for several in offered.values() for p in several):
            names = [name for name, several in offered.items() if precision in several]
            sizes = {
                name: sum(
                    t.nbytes for i in workload.settings[name] for t in workload.operators[i].input_tensors
                )
                for name in names
            }
            all_low = self.peak(device, samples, dict.fromkeys(names, precision))
            per_byte = (self.peak(device, samples, {}) - all_low) / max(1, sum(sizes.values()))
            savings |= {(name, precision): round(size * per_byte) for name, size in sizes.items()}
        return savings

    def _between(self, device: str, samples: int, low: int, high: int) -> RankMenu:
        a, b = self.menu(device, low), self.menu(device, high)
        part = (samples - low) / (high - low)
        weight = (samples / self.total) ** 2

        options: Options = {}
        for name in a.options:
            if name not in b.options:
                continue
            theirs = {o.precision: o for o in b.options[name]}
            options[name] = tuple(
                Option(
                    precision=o.precision,
                    seconds=_mixed(o.seconds, theirs[o.precision].seconds, part),
                    damage=0.0 if o.precision == OWN else self.damages[name][o.precision] * weight,
                    memory=round(o.memory + part * (theirs[o.precision].memory - o.memory)),
                )
                for o in a.options[name]
                if o.precision in theirs
            )
        return RankMenu(
            base_s=_mixed(a.base_s, b.base_s, part), own_s=_mixed(a.own_s, b.own_s, part), options=options
        )

    @property
    def counts(self) -> dict[str, int]:
        return rank_counts(self.cluster)


def _mixed(low: float, high: float, part: float) -> float:
    return max(0.0, low + part * (high - low))


def _around(samples: int) -> tuple[int, int]:
    """The nearest sizes below and above at which costs are looked up; both are `samples` if it is one of them."""
    if samples <= EVERY:
        return samples, samples
    sizes = [EVERY]
    while sizes[-1] < samples:
        sizes.append(max(sizes[-1] + 1, sizes[-1] * 6 // 5))
    place = bisect_left(sizes, samples)
    return (samples, samples) if sizes[place] == samples else (sizes[place - 1], sizes[place])
