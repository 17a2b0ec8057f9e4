"""Trade-offs of a rank between seconds, damage and memory, at any share of the batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from trimtab.planning.precision.frontier import Frontier
from trimtab.planning.precision.options import Chosen, Options, damage_of, own_only

RESOLUTION = 1500
"""Points of each frontier."""


@dataclass(frozen=True, kw_only=True)
class RankMenu:
    """What one rank of a device class with a given share can choose among."""

    base_s: float
    """Compute time until gradients are reduced, without the operators that can be lowered and the optimizer."""

    own_s: float
    """The same including those operators in the model's own precision."""

    options: Options


class Tradeoffs(ABC):
    """Implements `trimtab.planning.shares.with_precision.RankTradeoffs` for any source of menus and peak memory."""

    def __init__(self, limits: Mapping[str, int | None]) -> None:
        """`limits`: by device class, its memory in bytes; None for no limit."""
        self.limits = dict(limits)
        self._menus: dict[tuple[str, int], RankMenu] = {}
        self._frontiers: dict[tuple[str, int, float], Frontier] = {}

    def menu(self, device: str, samples: int) -> RankMenu:
        """The menu of a rank with this share."""
        key = (device, samples)
        if key not in self._menus:
            self._menus[key] = self._menu(device, samples)
        return self._menus[key]

    @abstractmethod
    def _menu(self, device: str, samples: int) -> RankMenu: ...

    @abstractmethod
    def peak(self, device: str, samples: int, chosen: Mapping[str, str]) -> int:
        """Peak memory of a rank; operators missing in `chosen` have the model's own precision."""

    def fits(self, device: str, samples: int, chosen: Mapping[str, str]) -> bool:
        limit = self.limits[device]
        return limit is None or self.peak(device, samples, chosen) <= limit

    def least_peak(self, device: str, samples: int) -> int:
        """Peak memory of a rank with every operator at the precision that saves least for backward."""
        options = self.menu(device, samples).options
        leanest = {name: min(several, key=lambda o: o.memory).precision for name, several in options.items()}
        return self.peak(device, samples, leanest)

    def most(self, device: str, total: int) -> int:
        """The most samples, up to `total`, that fit the memory of a rank at some precisions."""
        limit = self.limits[device]
        if limit is None:
            return total
        return most_within(lambda samples: self.least_peak(device, samples) <= limit, total)

    # What `shares.with_precision` uses

    def own_s(self, device: str, samples: int) -> float:
        return self._plain_s(device, samples) if self.fits(device, samples, {}) else inf

    def _plain_s(self, device: str, samples: int) -> float:
        """The menu's `own_s`."""
        return self.menu(device, samples).own_s

    def damage(self, device: str, samples: int, seconds: float) -> float:
        best = self._best(device, samples, seconds)
        return inf if best is None else best[0]

    def chosen(self, device: str, samples: int, seconds: float) -> Chosen:
        """The precisions that `damage` is based on."""
        best = self._best(device, samples, seconds)
        assert best is not None
        return best[1] if best[1] is not None else self._at(device, samples, seconds)

    def _best(self, device: str, samples: int, seconds: float) -> tuple[float, Chosen | None] | None:
        menu = self.menu(device, samples)
        if self.limits[device] is None and seconds >= menu.own_s:
            return 0.0, own_only(menu.options)
        place = self._frontier(device, samples).place(seconds - menu.base_s)
        if place is None:
            return None
        if self.limits[device] is None:
            return float(self._frontier(device, samples).cost[place]), None
        return self._fitting(device, samples, seconds)

    def _at(self, device: str, samples: int, seconds: float, price: float = 0.0) -> Chosen:
        frontier = self._frontier(device, samples, price)
        place = frontier.place(seconds - self.menu(device, samples).base_s)
        assert place is not None
        return frontier.chosen(place)

    def _fitting(self, device: str, samples: int, seconds: float) -> tuple[float, Chosen] | None:
        """The least damaging choice that also fits the memory: the price of a byte is raised until it does."""
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
        most = max((abs(o.memory) for several in options.values() for o in several), default=0)
        if not worst or not most:
            return (0.0,)
        return (0.0, *(worst / most * factor for factor in (0.01, 0.1, 1.0, 10.0)))

    def _frontier(self, device: str, samples: int, price: float = 0.0) -> Frontier:
        key = (device, samples, price)
        if key not in self._frontiers:
            options = self.menu(device, samples).options
            self._frontiers[key] = Frontier(options, price_of_memory=price, resolution=RESOLUTION)
        return self._frontiers[key]


def most_within(fits: Callable[[int], bool], total: int) -> int:
    """The largest number up to `total` that fits, where every smaller one fits too; 0 if 1 does not."""
    low, high = 0, 1
    while high <= total and fits(high):
        low, high = high, high * 2
    high = min(high, total + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
