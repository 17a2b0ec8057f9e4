"""What moves and leases really cost a job, compared with what was predicted from a few transfers at its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
        self._moves = self._leases = 1.0
        self._waited: float | None = None
        """Seconds of a step that the rank that waits least spent in collectives, in the last window."""
        self._expected: tuple[float, float] | None = None
        """Of a lease whose cost is not known yet: that time before it, and what it was predicted to add."""

    def applied(self, decision: Decision, took: float) -> None:
        """A decision was applied, in so many seconds."""
        if decision.mode == "own" and decision.once > 0:
            self.move_ratio = took / (decision.once / self._moves)
        self._expected = None
        if decision.mode == "lease" and decision.lent > 0 and self._waited is not None:
            self._expected = (self._waited, decision.lent / self._leases)
            self._unsettled = self._settling

    def learn(self, numbers: Sequence[Sequence[float]]) -> bool:
        """From the ranks' numbers of a window, of which the last two are `move_ratio` and seconds in collectives.

        The rank that waits least waits for no other: what it waits longer since a lease began, the lease costs.
        Returns whether a lease turned out to cost more than was predicted.
        """
        self._moves = max(ratio for *_, ratio, _ in numbers) or 1.0
        self._waited = min(waited for *_, waited in numbers)
        if self._expected is None:
            return False
        if self._unsettled > 0:
            self._unsettled -= 1
            return False
        (before, predicted), self._expected = self._expected, None
        self._leases = min(_MOST, max(_LEAST, (self._waited - before) / predicted))
        return self._leases > 1

    def corrected(self, costs: Costs) -> Costs:
        own, lease = costs.own, costs.lease
        if own is not None:
            own = replace(own, fixed=own.fixed * self._moves, slope=own.slope * self._moves)
        return Costs(own=own, lease=None if lease is None else replace(lease, ratio=self._leases))
