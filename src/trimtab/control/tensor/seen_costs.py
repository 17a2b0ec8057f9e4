"""What moves and leases really cost a job, compared with what was predicted from a few transfers at its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from trimtab.planning.tensor.rebalance import Costs, Decision

_LEAST, _MOST = 0.5, 100.0
"""Corrections of a lease's prediction. One window that saw no cost must not make leases look free for good."""


_SETTLED = 4
"""Steps of a window in whose median the first step of a lease does not count."""


class SeenCosts:
    """Measured over predicted costs; the same on every rank, since ranks exchange what they measured."""

    def __init__(self, window: int = _SETTLED) -> None:
        """`window` is the number of steps in one."""
        self._settling = 1 if window < _SETTLED else 0
        """Windows of a lease that say little about the others: in its first step nothing was sent ahead."""
        self._unsettled = 0
        self.move_ratio = 0.0
        """Of this rank's last move, without corrections; 0 before the first."""
        self._moves = 1.0
        self._lease: tuple[float, float] | None = None
        """What the last lease was seen to add to a step, and what it was predicted to add without corrections."""
        self._evened: list[float] = []
        """What moves added: even ranks wait for each other a little in every block, where only one did before."""
        self._waited: float | None = None
        """Seconds of a step that the rank that waits least spent in collectives, in the last window."""
        self._change: tuple[float, float | None] | None = None
        """Of a change whose effect is not known yet: that time before it, and what a lease was predicted to add."""

    def applied(self, decision: Decision, took: float) -> None:
        """A decision was applied, in so many seconds."""
        corrected = self._leases
        self._change = None
        if decision.mode == "own" and decision.once > 0:
            self.move_ratio = took / (decision.once / self._moves)
            self._begin(None)
        if decision.mode == "lease" and decision.lent > 0:
            self._begin(decision.lent / corrected)

    def _begin(self, lent: float | None) -> None:
        if self._waited is not None:
            self._change = (self._waited, lent)
            self._unsettled = self._settling

    def learn(self, numbers: Sequence[Sequence[float]]) -> bool:
        """From the ranks' numbers of a window, of which the last two are `move_ratio` and seconds in collectives.

        The rank that waits least waits for no other: what it waits longer since a lease began, the lease costs, but
        for what it waits longer after a move too. Returns whether a lease turned out to cost more than was predicted.
        """
        self._moves = max(ratio for *_, ratio, _ in numbers) or 1.0
        self._waited = min(waited for *_, waited in numbers)
        if self._change is None:
            return False
        if self._unsettled > 0:
            self._unsettled -= 1
            return False
        (before, lent), self._change = self._change, None
        added = self._waited - before
        if lent is None:
            self._evened.append(added)
            return False
        self._lease = (added, lent)
        return self._leases > 1

    @property
    def _leases(self) -> float:
        """Measured over predicted cost of leases."""
        if self._lease is None:
            return 1.0
        added, lent = self._lease
        evened = max(0.0, median(self._evened)) if self._evened else 0.0
        return min(_MOST, max(_LEAST, (added - evened) / lent))

    def corrected(self, costs: Costs) -> Costs:
        own, lease = costs.own, costs.lease
        if own is not None:
            own = replace(own, fixed=own.fixed * self._moves, slope=own.slope * self._moves)
        return Costs(own=own, lease=None if lease is None else replace(lease, ratio=self._leases))
