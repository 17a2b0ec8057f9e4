"""When measured times move batch shares: windows of steps, compared by all ranks together."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import torch.distributed as dist

from trimtab import environment
from trimtab.control.local_steps import running_local_steps
from trimtab.control.rank_values import gather_numbers
from trimtab.control.shares.capacity import BatchCapacity
from trimtab.measure.local_clock import LocalClock
from trimtab.planning.shares.batch import Adjust, noise_of, rebalance
from trimtab.report import events

_RUNS = 32
"""Changes of the shares over which measured times are kept."""

_WINDOWS = 64
"""Windows with the same shares that are kept."""


_FIXED = Adjust()


class ShareWindows:
    """Counts steps; at the end of a window the ranks compare their times, and all decide the same."""

    def __init__(
        self,
        rule: Adjust | None,
        capacity: BatchCapacity,
        *,
        group: dist.ProcessGroup | None,
        least: int = 1,
        accumulate: int = 1,
        limits: list[int | None] | None = None,
    ) -> None:
        """
        Args:
            rule: None if the shares are fixed; the ranks still exchange alarms.
            least: the fewest samples of a step for each rank.
            limits: the most that each has memory for, as far as known.
        """
        self.limits, self.least = limits, least
        self._rule, self._capacity, self._group, self._accumulate = rule, capacity, group, accumulate
        self.alarm = False
        """Whether some rank raised one in the last window."""
        self._steps = 0
        self._runs: deque[list[list[float]]] = deque([[]], maxlen=_RUNS)
        """Each rank's times by window, in one list for each time that the shares were the same."""
        self._comparable = False
        """With local steps: whether the numbers under way belong to the present shares."""

    def end_step(
        self, clock: LocalClock, shares: tuple[int, ...], *, usable: bool, alarm: bool = False
    ) -> tuple[int, ...] | None:
        """Count a finished step, if it had these shares; new shares if a window is complete and shows better ones.

        Collective at the end of a window; with local steps it waits only for ranks that are a whole window behind.
        """
        clock.end_step(keep=usable)
        self._steps += usable
        if not usable or self._steps < (self._rule or _FIXED).window:
            return None
        self._steps = 0
        with clock.waiting():
            by_rank = self._compare([clock.read(), self._capacity.samples(), float(alarm)])
        if by_rank is None:
            return None
        seconds = [own for own, _, _ in by_rank]
        self.alarm = any(raised for _, _, raised in by_rank)
        if self._rule is None or not all(own > 0 for own in seconds):
            return None
        windows = self._runs[-1]
        windows.append(seconds)
        del windows[:-_WINDOWS]
        self.limits = [None if limit < 0 else int(limit) * self._accumulate for _, limit, _ in by_rank]
        noise = noise_of(self._runs)
        new = rebalance(shares, windows, self._rule, noise=noise, most=self.limits, least=self.least)
        if not dist.is_initialized() or dist.get_rank(self._group) == 0:
            before, after = ("/".join(map(str, each)) for each in (shares, new or shares))
            times = "/".join(f"{own * 1e3:.0f}" for own in seconds)
            level = logging.DEBUG if new is None else logging.INFO
            text = (
                f"batch shares {before} take the ranks {times} ms, with a noise of {noise:.1%}; now {after}"
            )
            environment.logger().log(level, text)
            if new is not None:
                noticed = f"the ranks take {times} ms a step, with a noise of {noise:.1%}"
                emit_shares(shares, new, noticed=noticed, why="shares follow the ranks' speeds")
        return new

    def _compare(self, values: list[float]) -> list[list[float]] | None:
        """All ranks' numbers. Workers with local steps do not wait for each other, and get those of one window ago."""
        local = running_local_steps()
        if local is None:
            return gather_numbers(values, self._group)
        by_rank = local.numbers_of(self).exchange(values)
        comparable, self._comparable = self._comparable, True
        return by_rank if comparable else None

    def forget(self, clock: LocalClock | None) -> None:
        """The shares have changed: start a new window, and keep the noise of the old ones."""
        self._steps, self._comparable = 0, False
        if self._runs[-1]:
            self._runs.append([])
        if clock is not None:
            clock.forget()


def emit_shares(before: Sequence[int], after: Sequence[int], *, noticed: str | None, why: str) -> None:
    """Record that all ranks change their batch shares; only the first does."""
    if not events.is_first_rank():
        return
    old, new = ("/".join(map(str, each)) for each in (before, after))
    events.emit(
        "decision",
        what="shares",
        noticed=noticed,
        decided=f"batch shares {new} instead of {old}",
        why=why,
        expected={},
        before=list(before),
        after=list(after),
    )
