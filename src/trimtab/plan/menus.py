"""What each device class offers at each share: seconds, damage and memory of every operator, from measurements."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import fsum, inf
from typing import TYPE_CHECKING

from trimtab.plan.frontier import Frontier
from trimtab.plan.options import Option, damage_of
from trimtab.plan.plan import OWN
from trimtab.predict.costs import key_of
from trimtab.predict.memory import memory
from trimtab.predict.step import rank_counts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.cluster import Cluster
    from trimtab.plan.options import Chosen, Options
    from trimtab.predict.pace import Offers

EVERY = 16
"""Up to this many samples, costs are looked up one by one; above, at steps of a fifth, and between them linear."""


@dataclass(frozen=True, kw_only=True)
class Menu:
    """One rank of a device class with so many samples."""

    base_s: float
    """What a step takes beside the operators that can be lowered, the optimiser included."""

    own_s: float
    """A step with nothing lowered."""

    options: Options


class Menus:
    """Implements `trimtab.plan.joint.Trades`."""

    def __init__(
        self,
        offers: Offers,
        cluster: Cluster,
        damages: Mapping[str, Mapping[str, float]],
        total: int,
        *,
        resolution: int = 1500,
    ) -> None:
        """
        Args:
            damages: by operator and precision: of a rank that computes the whole batch.
            total: samples of the whole batch.
        """
        self.offers, self.cluster, self.damages, self.total = offers, cluster, damages, total
        self.resolution = resolution
        self.bits: int | None = None
        """Of gradients, whose codec takes memory."""

        self.limits = {
            name: None if device.memory_gib is None else int(device.memory_gib * 2**30)
            for name, device in cluster.devices.items()
        }
        self._menus: dict[tuple[str, int], Menu] = {}
        self._frontiers: dict[tuple[str, int, float], Frontier] = {}
        self._peaks: dict[tuple[str, int, int | None, tuple[tuple[str, str], ...]], int] = {}
        self._limited: dict[tuple[str, int, int | None, float], tuple[float, Chosen] | None] = {}

    def menu(self, device: str, samples: int) -> Menu:
        asked = (device, samples)
        if asked not in self._menus:
            low, high = _around(samples)
            self._menus[asked] = (
                self._looked_up(device, samples) if low == high else self._between(device, samples, low, high)
            )
        return self._menus[asked]

    # What `joint` asks

    def own_s(self, device: str, samples: int) -> float:
        if not self.fits(device, samples, {}):
            return inf
        return self.menu(device, samples).own_s

    def damage(self, device: str, samples: int, seconds: float) -> float:
        found = self._best(device, samples, seconds)
        return inf if found is None else found[0]

    def chosen(self, device: str, samples: int, seconds: float) -> Chosen:
        """The precisions behind `damage`."""
        found = self._best(device, samples, seconds)
        assert found is not None
        return found[1] if found[1] is not None else self._at(device, samples, seconds)

    def _best(self, device: str, samples: int, seconds: float) -> tuple[float, Chosen | None] | None:
        menu = self.menu(device, samples)
        place = self._frontier(device, samples).place(seconds - menu.base_s)
        if place is None:
            return None
        if self.limits[device] is None:
            return float(self._frontier(device, samples).cost[place]), None
        asked = (device, samples, self.bits, seconds)
        if asked not in self._limited:
            self._limited[asked] = self._fitting(device, samples, seconds)
        return self._limited[asked]

    def _at(self, device: str, samples: int, seconds: float, price: float = 0.0) -> Chosen:
        frontier = self._frontier(device, samples, price)
        place = frontier.place(seconds - self.menu(device, samples).base_s)
        assert place is not None
        return frontier.chosen(place)

    def _fitting(self, device: str, samples: int, seconds: float) -> tuple[float, Chosen] | None:
        """The least damaging choice that fits the memory, too: with bytes dearer and dearer until it does."""
        menu = self.menu(device, samples)
        best: tuple[float, Chosen] | None = None
        for price in self._prices(menu.options):
            chosen = self._at(device, samples, seconds, price)
            damage = damage_of(menu.options, chosen)
            if (best is None or damage < best[0]) and self.fits(device, samples, chosen):
                best = damage, chosen
                if price == 0:
                    break
        return best

    @staticmethod
    def _prices(options: Options) -> tuple[float, ...]:
        worst = max((o.damage for several in options.values() for o in several), default=0.0)
        most = max((o.memory for several in options.values() for o in several), default=0)
        if not worst or not most:
            return (0.0,)
        return (0.0, *(worst / most * factor for factor in (0.01, 0.1, 1.0, 10.0)))

    def _frontier(self, device: str, samples: int, price: float = 0.0) -> Frontier:
        asked = (device, samples, price)
        if asked not in self._frontiers:
            options = self.menu(device, samples).options
            self._frontiers[asked] = Frontier(options, price_of_memory=price, resolution=self.resolution)
        return self._frontiers[asked]

    # Memory

    def fits(self, device: str, samples: int, chosen: Mapping[str, str]) -> bool:
        limit = self.limits[device]
        return limit is None or self.peak(device, samples, chosen) <= limit

    def peak(self, device: str, samples: int, chosen: Mapping[str, str]) -> int:
        """Bytes that a rank needs of its device."""
        lowered = tuple(sorted((name, p) for name, p in chosen.items() if p != OWN))
        asked = (device, samples, self.bits, lowered)
        if asked not in self._peaks:
            world = self.cluster.world_size
            self._peaks[asked] = memory(
                self.offers.measured.at(samples),
                dict(lowered) or None,
                kind=self.cluster.devices[device].kind,
                data_parallel=world > 1,
                bits=self.bits,
                world=world,
            ).reserved
        return self._peaks[asked]

    # From measurements

    def _looked_up(self, device: str, samples: int) -> Menu:
        offers, weight = self.offers, (samples / self.total) ** 2
        mapper = offers.mapper(device, samples, self.cluster.devices[device].kind)
        workload = mapper.workload
        optimiser = offers.measured.device(device).optimiser
        elements = sum(p.tensor.numel for p in workload.parameters if p.trainable)
        whole = mapper.total_s + (optimiser.seconds(elements) if optimiser is not None else 0.0)
        offered = offers.precisions(device, samples)
        options: Options = {}
        of_key: dict[object, dict[str, tuple[float, int]]] = {}
        for name, indices in workload.settings.items():
            choices = [p for p in offered[name] if p in self.damages.get(name, {})]
            if not choices:
                continue
            key = (tuple(key_of(workload.operators[i]) for i in indices), tuple(choices))
            if key not in of_key:
                own = fsum(mapper.forward_s[i] + mapper.backward_s[i] for i in indices)
                figures = {OWN: (own, self._extra(device, samples, {}))}
                for precision in choices:
                    change = mapper.change(name, precision)
                    figures[precision] = (
                        max(0.0, own + change.delta_s),
                        self._extra(device, samples, {name: precision}),
                    )
                    mapper.undo(change)
                of_key[key] = figures
            options[name] = tuple(
                Option(
                    precision=precision,
                    seconds=seconds,
                    damage=0.0 if precision == OWN else self.damages[name][precision] * weight,
                    memory=extra,
                )
                for precision, (seconds, extra) in of_key[key].items()
            )
        own = fsum(several[0].seconds for several in options.values())
        return Menu(base_s=max(0.0, whole - own), own_s=whole, options=options)

    def _extra(self, device: str, samples: int, chosen: Chosen) -> int:
        """Bytes beyond nothing lowered; not worked out where there is no limit."""
        if self.limits[device] is None:
            return 0
        return self.peak(device, samples, chosen) - self.peak(device, samples, {})

    def _between(self, device: str, samples: int, low: int, high: int) -> Menu:
        a, b = self.menu(device, low), self.menu(device, high)
        part = (samples - low) / (high - low)
        weight = (samples / self.total) ** 2

        def mixed(x: float, y: float) -> float:
            return max(0.0, x + part * (y - x))

        options: Options = {}
        for name in a.options:
            if name not in b.options:
                continue
            theirs = {o.precision: o for o in b.options[name]}
            options[name] = tuple(
                Option(
                    precision=o.precision,
                    seconds=mixed(o.seconds, theirs[o.precision].seconds),
                    damage=0.0 if o.precision == OWN else self.damages[name][o.precision] * weight,
                    memory=round(o.memory + part * (theirs[o.precision].memory - o.memory)),
                )
                for o in a.options[name]
                if o.precision in theirs
            )
        return Menu(base_s=mixed(a.base_s, b.base_s), own_s=mixed(a.own_s, b.own_s), options=options)

    @property
    def counts(self) -> dict[str, int]:
        return rank_counts(self.cluster)


def _around(samples: int) -> tuple[int, int]:
    """The sizes at which costs are looked up, below and above; both are `samples` where it is one of them."""
    if samples <= EVERY:
        return samples, samples
    sizes = [EVERY]
    while sizes[-1] < samples:
        sizes.append(max(sizes[-1] + 1, sizes[-1] * 6 // 5))
    place = bisect_left(sizes, samples)
    return (samples, samples) if sizes[place] == samples else (sizes[place - 1], sizes[place])
