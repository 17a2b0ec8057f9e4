"""When measured times move batch shares: windows of steps, compared by all ranks together."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import torch.distributed as dist

from trimtab import environment
from trimtab.control.rank_values import gather_numbers
from trimtab.control.running_local_steps import running_local_steps
from trimtab.control.shares.capacity import BatchCapacity
from trimtab.measure.local_clock import LocalClock
from trimtab.planning.shares.batch import Adjust, Run, fixed_seconds, noise_of, rebalance, without_waiting
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
        self._runs: deque[Run] = deque(maxlen=_RUNS)
        """One for each time that the shares were the same."""
        self._comparable_runs = 0
        """How many of them, the last ones, were measured with one speed of the ranks, as far as is known."""
        self._ended = False
        """Whether the shares have changed since the last window."""
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
            own = [clock.read(), clock.read_update(), clock.read_forward()]
            own += [self._capacity.samples(), float(alarm)]
            by_rank = self._compare(own)
        if by_rank is None:
            return None
        seconds, updates, forwards, limits, alarms = zip(*by_rank, strict=True)
        self.alarm = any(alarms)
        if self._rule is None or not all(own > 0 for own in seconds):
            return None
        seconds = without_waiting(seconds, updates, forwards)
        if not self._runs or self._ended:
            self._runs.append(Run(shares=shares, windows=[]))
            self._comparable_runs, self._ended = self._comparable_runs + 1, False
        windows = self._runs[-1].windows
        windows.append(list(seconds))
        del windows[:-_WINDOWS]
        self.limits = [None if limit < 0 else int(limit) * self._accumulate for limit in limits]
        noise = noise_of([run.windows for run in self._runs])
        runs = list(self._runs)[-self._comparable_runs :]
        fixed = fixed_seconds(runs, noise=noise, known=updates)
        new = rebalance(runs, self._rule, noise=noise, fixed=fixed, most=self.limits, least=self.least)
        if not dist.is_initialized() or dist.get_rank(self._group) == 0:
            before, after, times = map(
                environment.listed_by_rank, (shares, new or shares, [own * 1e3 for own in seconds])
            )
            level = logging.DEBUG if new is None else logging.INFO
            text = (
                f"batch shares {before} take the ranks {times} ms, with a noise of {noise:.1%}; now {after}"
            )
            environment.logger().log(level, text)
            environment.logger().debug("by rank: shares %s, seconds %s; now %s", shares, seconds, new)
            if new is not None:
                noticed = f"the ranks take {times} ms a step, with a noise of {noise:.1%}"
                emit_shares(shares, new, noticed=noticed, why="shares follow the ranks' speeds")
        return new

    def _compare(self, values: list[float]) -> list[list[float]] | None:
        """All ranks' numbers. Workers with local steps do not wait for each other, and get those of one window ago."""
        local = running_local_steps()
        if local is None:
            return gather_numbers(values, self._group)
        by_rank = local.numbers.of(self).exchange(values)
        comparable, self._comparable = self._comparable, True
        return by_rank if comparable else None

    def forget(self, clock: LocalClock | None, *, other_speeds: bool = False) -> None:
        """The shares have changed: start a new window, and keep the noise of the old ones.

        Args:
            other_speeds: so have the ranks' speeds, by other precisions; old times say nothing about the new ones.
        """
        self._steps, self._comparable, self._ended = 0, False, True
        if other_speeds:
            self._comparable_runs = 0
        if clock is not None:
            clock.forget()


def emit_shares(before: Sequence[int], after: Sequence[int], *, noticed: str | None, why: str) -> None:
    """Record that all ranks change their batch shares; only the first does."""
    if not events.is_first_rank():
        return
    old, new = map(environment.listed_by_rank, (before, after))
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
