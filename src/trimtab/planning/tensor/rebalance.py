"""What to do about slow tensor-parallel ranks while a job runs. Pure functions, the same on every rank.

A step waits for its slowest rank. Part of a slow rank's work can be moved to others for good (*own*: weights
and optimizer state move once), part can be computed by others for a while (*lease*: weights and gradients move
in every step), and part can be left out (*resize*, the only one that changes the training). Shares are fractions of
all work of the model's units; times are seconds of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Literal

from trimtab.planning.tensor.balance import Balance
from trimtab.planning.tensor.shares import BlockSize, share_blocks, water_fill
from trimtab.predict.migration import LeaseCost, MigrationCost
from trimtab.predict.share_time import ShareTime

Mode = Literal["home", "own", "lease"]

_FINENESS = 1024
"""Resolution of shares: multiples of 1 / this."""

_LEAST = 1 / 64
"""Every rank keeps this fraction of the work: without any, its speed could not be measured."""

_PRUNED_STEPS = 10
"""Candidates between pruning nothing and as much as allowed."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Measurements of one rank."""

    blocks: float
    """Seconds in its units."""

    rest: float
    """Its other seconds, without waiting."""

    share: float
    """Fraction of all work that it computes."""

    pruned: float = 0.0
    """Fraction of its share that it leaves out."""

    home: float | None = None
    """Fraction of all work that it owns; None if that is what it computes."""

    most: float = 1.0
    """Largest fraction that its memory allows it to own."""

    @cached_property
    def time(self) -> ShareTime:
        """Its time as a function of its share, independent of its current one."""
        return ShareTime.measured(self.blocks, self.rest, self.share, self.pruned)

    @property
    def whole(self) -> float:
        """Seconds of all work on this rank."""
        return self.time.whole

    @property
    def owned(self) -> float:
        return self.share if self.home is None else self.home


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of migration; None where a kind of migration is impossible."""

    own: MigrationCost | None
    """Cost of a move, paid once."""

    lease: LeaseCost | None
    """Cost in every step, as far as computation does not hide it."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What every rank will do."""

    mode: Mode
    """How work gets from owners to others: not at all, permanently, or in every step."""

    shares: tuple[float, ...]
    """Fraction of all work that each rank computes."""

    pruned: tuple[float, ...]
    """Fraction of its share that each rank leaves out."""

    actions: tuple[str, ...]
    """For each rank: nothing, resize, lease, own, both, or helps."""

    before: float
    """Seconds of the slowest rank now."""

    predicted: float
    """Seconds of the slowest rank afterwards, including the cost of a lease."""

    once: float = 0.0
    """Seconds of the change itself."""

    lent: float = 0.0
    """Seconds of a step that the transfers of a lease take, included in `predicted`."""


def uneven(windows: Sequence[Sequence[float]], rules: Balance) -> bool:
    """Whether the ranks' own times since the last change, one entry per window, require a decision.

    They do when some rank was slow in each of the last windows: one bad window is noise.
    """
    last = windows[-rules.patience :]
    if len(last) < rules.patience or not all(min(times) > 0 for times in last):
        return False
    slow = [{i for i, time in enumerate(times) if time > rules.threshold * min(times)} for times in last]
    return bool(set.intersection(*slow))


def expected_steps(lasted: int, past: Sequence[int], rules: Balance) -> int:
    """How many more steps the ranks will stay uneven, given how long they have been and earlier durations.

    As long as earlier periods, if there were any and this one is not longer already; else as long again as it has
    lasted, which is fair for something that may end at any time.
    """
    if past and lasted < (typical := median(past)):
        return max(rules.window, round(typical - lasted))
    return max(rules.window, lasted) if past else max(rules.horizon, lasted)


def decide(ranks: Sequence[Rank], costs: Costs, rules: Balance, *, steps: int) -> Decision:
    """The best of: change nothing; resize slow ranks; move work from the slowest ones and resize the rest.

    Args:
        steps: how long the current speeds are expected to last; a move away from a slow rank must pay off in that
            time, there and back.
    """
    shares, pruned = [rank.share for rank in ranks], [rank.pruned for rank in ranks]
    lent = any(abs(rank.share - rank.owned) > 0 for rank in ranks)
    now = _judged(ranks, shares, pruned, "lease" if lent else "home", costs)
    trips = 2 if _slow(ranks, rules) else 1
    best, least = None, (1 - rules.margin) * _worth(now, rules, steps, trips)
    for shares, pruned, mode in _ways(ranks, rules):
        if (mode == "own" and costs.own is None) or (mode == "lease" and costs.lease is None):
            continue
        candidate = _judged(ranks, shares, pruned, mode, costs)
        worth = _worth(candidate, rules, steps, trips)
        if worth < least:
            best, least = candidate, worth
    chosen = best or now
    if chosen.mode == "lease":  # the margin is no reason to keep one that costs more than it saves
        owned = [rank.owned for rank in ranks]
        home = _judged(ranks, owned, [0.0] * len(ranks), "home", costs)
        return home if home.predicted <= chosen.predicted else chosen
    return chosen


def changes(decision: Decision, ranks: Sequence[Rank]) -> bool:
    """Whether a decision changes anything."""
    return any(
        abs(share - rank.share) > 0 or abs(pruned - rank.pruned) > 0
        for share, pruned, rank in zip(decision.shares, decision.pruned, ranks, strict=True)
    )


def counts_for(units: Mapping[str, int], shares: Sequence[float]) -> dict[str, tuple[int, ...]]:
    """Units of every block for each rank, in proportion to its share."""
    return share_blocks({name: BlockSize(units=each, unit_bytes=1) for name, each in units.items()}, shares)


def _ways(ranks: Sequence[Rank], rules: Balance) -> list[tuple[list[float], list[float], Mode]]:
    """Shares, fractions left out and mode of every candidate."""
    owned = [rank.owned for rank in ranks]
    alone = [rank.time.seconds(rank.owned) for rank in ranks]
    slow = sorted(_slow(ranks, rules), key=lambda i: alone[i], reverse=True)
    others = [i for i in range(len(ranks)) if i not in slow]
    reference = max((alone[i] for i in others), default=0.0)
    ways: list[tuple[list[float], list[float], Mode]] = [
        (owned, [0.0] * len(ranks), "home"),
        (owned, _resized(ranks, owned, slow, reference, rules), "home"),
    ]
    for migrating in range(len(slow) if not others else 1, len(slow) + 1):
        resizing = slow[migrating:]
        pool = [i for i in range(len(ranks)) if i not in resizing]
        for step in range(_PRUNED_STEPS + 1 if rules.resize else 1):
            gamma = min(rules.resize, rules.resize * step / _PRUNED_STEPS)
            pruned = [gamma if i in slow[:migrating] else 0.0 for i in range(len(ranks))]
            shares, level = _filled(ranks, owned, pool, pruned)
            for i, part in enumerate(_resized(ranks, owned, resizing, level, rules)):
                pruned[i] = max(pruned[i], part)
            ways += [(shares, list(pruned), "own"), (shares, list(pruned), "lease")]
    if not slow:  # equal speeds: back to equal work
        shares, _ = _filled(ranks, owned, list(range(len(ranks))), [0.0] * len(ranks))
        ways += [(shares, [0.0] * len(ranks), "own"), (shares, [0.0] * len(ranks), "lease")]
    return ways


def _resized(
    ranks: Sequence[Rank], owned: Sequence[float], which: Sequence[int], level: float, rules: Balance
) -> list[float]:
    """What these ranks leave out to finish by `level`, as far as that is allowed."""
    pruned = [0.0] * len(ranks)
    for i in which:
        if ranks[i].whole * owned[i] > 0:
            kept = ranks[i].time.share_within(level) / owned[i]
            pruned[i] = min(rules.resize, max(0.0, 1 - kept))
    return pruned


def _filled(
    ranks: Sequence[Rank], owned: Sequence[float], pool: Sequence[int], pruned: Sequence[float]
) -> tuple[list[float], float]:
    """The pool's work, shared so that its last rank finishes as early as possible, and when that is."""
    total = round(sum(owned[i] for i in pool) * _FINENESS)
    fill = water_fill(
        total,
        [ranks[i].whole * (1 - pruned[i]) / _FINENESS for i in pool],
        fixed=[ranks[i].rest for i in pool],
        most=[max(round(owned[i] * _FINENESS), int(ranks[i].most * _FINENESS)) for i in pool],
    )
    shares = list(owned)
    for i, count in zip(pool, fill.counts, strict=True):
        shares[i] = max(_LEAST, count / _FINENESS)
    excess = sum(shares) - sum(owned)
    largest = max(pool, key=lambda i: shares[i])
    shares[largest] -= excess
    return shares, fill.time


def _judged(
    ranks: Sequence[Rank],
    shares: Sequence[float],
    pruned: Sequence[float],
    mode: Mode,
    costs: Costs,
) -> Decision:
    moved = sum(max(0.0, share - rank.owned) for share, rank in zip(shares, ranks, strict=True))
    time = max(
        rank.time.seconds(share, part) for rank, share, part in zip(ranks, shares, pruned, strict=True)
    )
    once = lent = 0.0
    if mode == "own" and costs.own is not None:
        once = costs.own(moved)
    elif mode == "lease" and costs.lease is not None:
        lent = costs.lease(moved, time)
        time += lent
    actions = []
    for rank, share, part in zip(ranks, shares, pruned, strict=True):
        gave, took = rank.owned - share > 1 / _FINENESS, share - rank.owned > 1 / _FINENESS
        kept = "resize" if part else "helps" if took else "nothing"
        actions.append(kept if not gave else "both" if part else mode)
    return Decision(
        mode=mode,
        shares=tuple(shares),
        pruned=tuple(pruned),
        actions=tuple(actions),
        before=max(rank.rest + rank.blocks for rank in ranks),
        predicted=time,
        once=once,
        lent=lent,
    )


def _slow(ranks: Sequence[Rank], rules: Balance) -> list[int]:
    fastest = min(rank.whole for rank in ranks)
    return [i for i, rank in enumerate(ranks) if rank.whole > rules.threshold * fastest]


def _worth(decision: Decision, rules: Balance, steps: int, trips: int) -> float:
    """Cost of a step under a decision: its time, its part of the moves, and the price of what is left out."""
    left_out = sum(s * p for s, p in zip(decision.shares, decision.pruned, strict=True))
    # A power: leaving out more always shortens steps, and must not look like progress for that reason alone.
    return float((decision.predicted + trips * decision.once / steps) / (1 - left_out) ** rules.price)
