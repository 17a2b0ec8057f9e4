"""Lower precision of the projections of tensor groups, within a damage budget. Pure functions.

Between two meetings of a group the slowest rank sets the pace, so a block takes as long as its slowest rank, and
the blocks add up. That gives an exact search from the inside out:

1. a rank's projections of a block: the Pareto frontier of seconds and damage (`precision.frontier`);
2. a block: for every pace, the least damage with which all of its ranks keep it;
3. a group: the frontier over its blocks;
4. the job: the shortest pace of all groups whose damage is within the budget.

Each rank lowers by itself, because results of projections are summed and all ranks go on with the same sum. What all
ranks of a group compute alike is never lowered: unlike precisions would give unlike replicas. Rounding errors of units
are independent, so a rank with a part of the units does that part of the damage of all of them.

Shares of units and samples are searched for again with the lowered ranks, and these are lowered anew.

With equal batch shares there is no budget: slow groups are lowered just enough to keep the pace of the fastest one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum

from trimtab.planning.precision.damage_curve import budgets
from trimtab.planning.precision.frontier import Frontier
from trimtab.planning.precision.options import Option, Options, lowered
from trimtab.planning.tensor.layout import MANY_RANKS, Layout, LayoutSearch
from trimtab.precision_names import OWN
from trimtab.predict.operators.measured_precisions import MeasuredPrecisions
from trimtab.predict.tensor import Precisions, TensorSetting
from trimtab.workload.units import shares_of

ROUNDS = 3
"""How often shares and precisions follow each other."""

FEW_KINDS = 4
"""Where groups are of more kinds, shares do not follow what was lowered, and frontiers are coarser."""

RESOLUTION, COARSE = 400, 100
"""Points of a frontier, with few kinds of groups and with many."""

Lowered = tuple[Precisions, ...]
"""Precisions of a group's ranks."""


@dataclass(kw_only=True)
class Lowering:
    """Searches the precisions of one job's tensor groups."""

    layouts: LayoutSearch
    measured: MeasuredPrecisions
    damages: Mapping[str, Mapping[str, float]]
    """By operator and precision, for a rank that computes the whole batch; finite."""

    budget: float
    """With free shares."""

    level: bool = False
    """Equal shares: lower only what is slower than the fastest group, instead of what the budget allows."""

    _seconds: dict[object, dict[tuple[str, str], tuple[float, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        units = {span.name: span.units for span in self.layouts.job.measured.workload.units}
        self.blocks = self.layouts.job.projections()
        """The block of each projection."""
        self._units = {name: units[block] for name, block in self.blocks.items()}

    def best(self, layout: Layout) -> Layout:
        """The fastest layout found from this one within the budget; this one if nothing is faster."""
        if not (self.budget or self.level) or not any(
            self._offered(device, 1) for device in {rank.device for rank in self.layouts.job.ranks}
        ):
            return layout
        if self.level:
            even = self._levelled(layout)
            found = even if even.order < layout.order else layout
            return replace(found, damage=self.damage(found.setting))
        size, setting, few = len(layout.shares), layout.setting, self.few_kinds(layout)
        found = layout
        for shares in dict.fromkeys((layout.shares, (1 / size,) * size)):
            now = self.layouts.at(setting.groups, shares, setting.samples, setting.bits)
            for _ in range(ROUNDS if few and len(self.layouts.job.ranks) <= MANY_RANKS else 1):
                low = self._lowest(now)
                moved = self.layouts.improved(low, within=self._within) if few else low
                step_s = now.step.step_s if now.setting.precisions else float("inf")
                fastest = min((low, moved), key=lambda one: one.order)
                if fastest.order < found.order and self._within(fastest):
                    found = fastest
                if fastest.step.step_s >= step_s:
                    break
                now = fastest
        return replace(found, damage=self.damage(found.setting))

    def few_kinds(self, layout: Layout) -> bool:
        """Whether the groups are of few kinds."""
        return len({self.layouts.job.kind(group, 0) for group in layout.setting.groups}) <= FEW_KINDS

    def curve(self, layout: Layout) -> list[Layout]:
        """The layout at other damage budgets, with the same shares: from no damage to the fastest step."""
        kinds, keys = self._kinds(layout)
        most = fsum(count * (one.damage(one.paces[0]) or 0.0) for one, count in kinds.values())
        points = [self._paced(layout, kinds, keys, self._pace(kinds, budget)) for budget in budgets(most)]
        return [replace(point, damage=self.damage(point.setting)) for point in points]

    def _within(self, layout: Layout) -> bool:
        return self.damage(layout.setting) <= self.budget

    def damage(self, setting: TensorSetting) -> float:
        """Of all ranks' lowered projections."""
        groups: dict[tuple[int, int], list[int]] = {}
        for index, samples in enumerate(setting.samples if setting.precisions else ()):
            # Groups that are alike have the same object.
            groups.setdefault((id(setting.precisions[index]), samples), []).append(index)
        return fsum(
            len(alike)
            * (samples / self.layouts.total) ** 2
            * fsum(
                self.damages[name][precision] * self._part(name, counts)
                for precisions, counts in zip(setting.precisions[alike[0]], setting.counts, strict=True)
                for name, precision in precisions.items()
            )
            for (_, samples), alike in groups.items()
        )

    def _lowest(self, layout: Layout) -> Layout:
        """The layout with the fastest precisions within the budget, as the frontiers have it."""
        kinds, keys = self._kinds(layout)
        return self._paced(layout, kinds, keys, self._pace(kinds, self.budget))

    def _levelled(self, layout: Layout) -> Layout:
        """The layout in which groups keep the pace of the fastest one, as far as they can."""
        kinds, keys = self._kinds(layout)
        fastest = min(one.paces[-1] for one, _ in kinds.values())
        reachable = max(one.paces[0] for one, _ in kinds.values())
        return self._paced(layout, kinds, keys, max(fastest, reachable))

    def _kinds(self, layout: Layout) -> tuple[Kinds, list[object]]:
        """The frontier of each kind of group with their number, and the kind of each group."""
        setting, job = layout.setting, self.layouts.job
        keys = [job.kind(group, own) for group, own in zip(setting.groups, setting.samples, strict=True)]
        resolution = RESOLUTION if self.few_kinds(layout) else COARSE
        kinds: Kinds = {}
        for key, group, samples in zip(keys, setting.groups, setting.samples, strict=True):
            known = kinds.get(key)
            frontier = known[0] if known else GroupFrontier(self, setting, group, samples, resolution)
            kinds[key] = frontier, (known[1] if known else 0) + 1
        return kinds, keys

    def _pace(self, kinds: Kinds, budget: float) -> float:
        """The shortest pace of all groups whose damage is within a budget."""
        paces = sorted(pace for frontier, _ in kinds.values() for pace in frontier.paces)
        first, last = 0, len(paces) - 1
        while first < last:  # damage falls as the pace slows down
            middle = (first + last) // 2
            damages = [(frontier.damage(paces[middle]), count) for frontier, count in kinds.values()]
            within = all(own is not None for own, _ in damages) and (
                fsum(count * (own or 0.0) for own, count in damages) <= budget
            )
            first, last = (first, middle) if within else (middle + 1, last)
        return paces[first]

    def _paced(self, layout: Layout, kinds: Kinds, keys: Sequence[object], pace: float) -> Layout:
        """The layout whose groups keep this pace with the least damage."""
        setting = layout.setting
        chosen = {key: frontier.chosen(pace) for key, (frontier, _) in kinds.items()}
        return self.layouts.at(
            setting.groups,
            layout.shares,
            setting.samples,
            setting.bits,
            tuple(chosen[key] for key in keys),
        )

    def menu(self, device: str, samples: int, counts: Mapping[str, int]) -> dict[str, Options]:
        """By block, what a rank may choose for each of its projections."""
        weight = (samples / self.layouts.total) ** 2
        seconds = self._times(device, samples)
        blocks: dict[str, Options] = {}
        for name, precisions in self._offered(device, samples).items():
            part, block = self._part(name, counts), self.blocks[name]
            if not part:
                continue
            blocks.setdefault(block, {})[name] = tuple(
                Option(
                    precision=precision,
                    seconds=part * fsum(seconds[name, precision]),
                    damage=0.0 if precision == OWN else weight * part * self.damages[name][precision],
                )
                for precision in (OWN, *precisions)
            )
        return blocks

    def _times(self, device: str, samples: int) -> dict[tuple[str, str], tuple[float, float]]:
        """Forward and backward of each projection in each precision, with all units."""
        key = device, samples
        if key not in self._seconds:
            offered = self._offered(device, samples)
            settings = self.measured.operators.workload.settings
            times: dict[tuple[str, str], tuple[float, float]] = {}
            for precision in dict.fromkeys((OWN, *(p for several in offered.values() for p in several))):
                names = [n for n, several in offered.items() if precision == OWN or precision in several]
                # A lowered projection hands on the type of its input: its neighbors take as long as before.
                chosen = {} if precision == OWN else dict.fromkeys(names, precision)
                forward, backward = self.layouts.job.operator_s(device, samples, chosen)
                for name in names:
                    calls = settings[name]
                    times[name, precision] = fsum(forward[i] for i in calls), fsum(backward[i] for i in calls)
            self._seconds[key] = times
        return self._seconds[key]

    def _offered(self, device: str, samples: int) -> dict[str, tuple[str, ...]]:
        measured = self.measured.precisions(device, samples)
        return {
            name: offered
            for name in self.blocks
            if (offered := tuple(p for p in measured[name] if p in self.damages.get(name, {})))
        }

    def _part(self, name: str, counts: Mapping[str, int]) -> float:
        return counts[self.blocks[name]] / self._units[name]


class GroupFrontier:
    """For every pace of a group, the least damage with which its ranks keep it."""

    def __init__(
        self,
        search: Lowering,
        setting: TensorSetting,
        group: Sequence[int],
        samples: int,
        resolution: int = RESOLUTION,
    ) -> None:
        job = search.layouts.job
        whole = job.measured.at(samples)
        spans = sorted(whole.units, key=lambda span: span.out)
        menus, times = [], []
        for rank, counts in zip(group, setting.counts, strict=True):
            device = job.ranks[rank].device
            menus.append(search.menu(device, samples, counts))
            part = shares_of(whole, counts)
            times.append(
                [[s * part.get(i, 1.0) for i, s in enumerate(own)] for own in job.operator_s(device, samples)]
            )
        self._points: dict[str, list[tuple[float, Lowered]]] = {}
        options: Options = {}
        for place, span in enumerate(spans):
            # What is computed up to the meetings of this block, in each pass.
            before = range(spans[place - 1].out + 1 if place else 0, span.out + 1)
            after = min(spans[place + 1].into) if place + 1 < len(spans) else len(whole.operators)
            behind = range(min(span.into), after)
            stretch = [
                fsum(forward[i] for i in before) + fsum(backward[i] for i in behind)
                for forward, backward in times
            ]
            points = _of_block([menu.get(span.name, {}) for menu in menus], stretch, resolution)
            self._points[span.name] = [(seconds, chosen) for seconds, _, chosen in points]
            options[span.name] = tuple(
                Option(precision=str(index), seconds=seconds, damage=damage)
                for index, (seconds, damage, _) in enumerate(points)
            )
        self._frontier = Frontier(options, resolution=resolution)
        alone = replace(setting, groups=(tuple(group),), samples=(samples,), bits=None, precisions=())
        slowest = float(self._frontier.seconds[-1])
        self._rest_s = job.step(alone).step_s - slowest
        self.paces = [self._rest_s + float(seconds) for seconds in self._frontier.seconds]

    def damage(self, pace: float) -> float | None:
        """None if the group cannot keep this pace."""
        place = self._frontier.place(pace - self._rest_s)
        return None if place is None else float(self._frontier.cost[place])

    def chosen(self, pace: float) -> Lowered:
        """Precisions of the ranks; of a group that is too slow the fastest ones."""
        picks = self._frontier.chosen(self._frontier.place(pace - self._rest_s) or 0)
        of_blocks = [self._points[block][int(index)][1] for block, index in picks.items()]
        return tuple(
            {name: precision for own in of_blocks for name, precision in own[rank].items()}
            for rank in range(len(of_blocks[0]))
        )


Kinds = dict[object, tuple[GroupFrontier, int]]
"""By kind of group: its frontier, and how many groups are of that kind."""


def _of_block(
    menus: Sequence[Options], stretch: Sequence[float], resolution: int
) -> list[tuple[float, float, Lowered]]:
    """(seconds, damage, precisions by rank) of a block, from the fastest; `stretch` is what ranks take as they are."""
    frontiers = [Frontier(menu, resolution=resolution) for menu in menus]
    # What the rank takes beside the projections that it may lower.
    rest = [
        whole - fsum(next(o.seconds for o in several if o.precision == OWN) for several in menu.values())
        for menu, whole in zip(menus, stretch, strict=True)
    ]
    paces = sorted({r + float(s) for r, own in zip(rest, frontiers, strict=True) for s in own.seconds})
    points: list[tuple[float, float, Lowered]] = []
    for pace in paces:
        places = [own.place(pace - r) for own, r in zip(frontiers, rest, strict=True)]
        if any(place is None for place in places):
            continue
        damage = fsum(float(own.cost[place or 0]) for own, place in zip(frontiers, places, strict=True))
        if not points or damage < points[-1][1]:
            chosen = tuple(
                lowered(own.chosen(place or 0)) for own, place in zip(frontiers, places, strict=True)
            )
            points.append((pace, damage, chosen))
        if not damage:
            break
    return points
