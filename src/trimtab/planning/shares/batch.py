"""How many samples of a global batch each data-parallel rank should take. Pure functions.

The ranks wait for each other once a step, when gradients are averaged, so a step lasts as long as its slowest
rank. The best shares make all ranks finish together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import hypot, inf, log, sqrt
from statistics import fmean, median, median_low

from trimtab.errors import TrimtabError
from trimtab.planning.tensor.shares import water_fill

_SIGMAS = 3.5
"""The slowest rank is slower than the mean by more than noise if by this many standard deviations."""

_REMEMBERED = 32
"""Windows over which the noise is known."""

_RECENT = 2
"""Earlier shares that the fixed part of a rank's time is learned from: speeds change."""

_MOST_FIXED = 0.5
"""The largest part of a rank's time that is taken for fixed: a speed that has changed in between looks like more."""

_BRIEF = 4
"""A move back is no change of speed but a wrong move before, if it comes within this many times what a move needs."""

_CORRECTION = 0.25
"""A move back by a smaller part of the one before only corrects it: such moves settle by themselves."""

_BASELINE = 8
"""The most windows before and after a change of speed that it is told from."""


@dataclass(frozen=True, kw_only=True)
class Adjust:
    """When shares follow measured times: soon after a rank's speed has changed, but not after every variation."""

    window: int = 5
    """Steps whose median counts as one measurement."""

    gain: float = 1.025
    """Move samples when the slowest rank would then be faster by this factor, or by more if times are noisy."""

    dwell: int = 2
    """Windows with the current shares before a small gain counts: their median is more reliable than one."""

    urgent: float = 1.2
    """A gain of this factor, and above the noise, counts at once: the speed of some rank has changed."""

    def __post_init__(self) -> None:
        if self.window < 1 or self.dwell < 1 or not 1 < self.gain <= self.urgent:
            raise TrimtabError(
                f"batch shares: {self}: window and dwell are at least 1, gain above 1 and at most urgent"
            )


def share_batch(
    total: int,
    per_sample: Sequence[float],
    *,
    fixed: Sequence[float] | None = None,
    most: Sequence[int | None] | None = None,
    least: int = 1,
) -> tuple[int, ...]:
    """Integer shares of `total` samples that minimize max(fixed + per_sample * share) over the ranks.

    Args:
        per_sample: for each rank, seconds per sample.
        fixed: for each rank, other seconds of a step.
        most: for each rank, the samples that fit its memory; None for no limit.
        least: what every rank gets, as far as there are enough samples. A rank without samples would not save
            time: it takes part in the average anyway, and for that computes a sample with weight zero.
    """
    ranks = len(per_sample)
    fixed = [0.0] * ranks if fixed is None else list(fixed)
    most = [None] * ranks if most is None else list(most)
    if ranks == 0 or len(fixed) != ranks or len(most) != ranks or total < 0 or least < 0:
        raise TrimtabError(
            f"batch shares: {total} samples, at least {least} each, cannot be shared among ranks with times "
            f"{list(per_sample)}, fixed times {fixed} and limits {most}; give each list one entry for each rank"
        )
    finite = float("inf")
    if not all(0 < time < finite for time in per_sample) or not all(0 <= time < finite for time in fixed):
        raise TrimtabError(
            f"batch shares: times of a sample must be above 0 and fixed times at least 0, all finite; got "
            f"{list(per_sample)} and {fixed}"
        )
    room = [total if limit is None else min(limit, total) for limit in most]
    base = min(least, total // ranks)
    if sum(room) < total or min(room) < base:
        raise TrimtabError(
            f"batch shares: a batch of {total} samples, at least {base} for each rank, does not fit: the ranks have "
            f"room for {', '.join(map(str, room))}; lower the batch size, accumulate over more batches, or use "
            "more ranks or memory"
        )
    above = water_fill(
        total - base * ranks,
        per_sample,
        fixed=[before + time * base for before, time in zip(fixed, per_sample, strict=True)],
        most=[limit - base for limit in room],
    )
    return tuple(base + count for count in above.counts)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What was measured while the shares were the same."""

    shares: tuple[int, ...]
    windows: list[list[float]]
    """For each window, each rank's own seconds of a step, without waiting for others."""


def shrink(total: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Shares of a smaller batch, the last of an epoch, in proportion to `shares`; none is larger than there."""
    assert total <= sum(shares), "a batch can only be shrunk"
    # The speed of a rank without samples is unknown; it gets some only when all others are full.
    each = [1 / max(share, 1e-9) for share in shares]
    return share_batch(total, each, most=list(shares), least=min(1, *shares))


def rebalance(
    runs: Sequence[Run],
    rule: Adjust,
    *,
    noise: float = 0.0,
    fixed: Sequence[float] | None = None,
    most: Sequence[int | None] | None = None,
    least: int = 1,
) -> tuple[int, ...] | None:
    """Better shares than the current ones, or None when these should stay.

    A rank's time is `fixed` + per_sample * n. If more of it is fixed than is known, the next shares go in the
    right direction but not far enough, and later ones continue from there: the ratio of two ranks' times comes
    closer to 1 each time and never crosses it, so nothing oscillates. So `fixed` should rather be too small.

    Times that jump at some number of samples (a cache that overflows, a short step that meets another thread) do
    cross it. After such a move back and forth, every further move takes twice the windows and goes half
    of the way; and shares under which a step took longer are not tried again, nor any beyond them as long as the
    present shares take what they took before that. Where times change otherwise than shares can explain, a rank has
    changed its speed: then earlier windows and earlier moves no longer count.

    A gain counts if the slowest rank is slower by more than noise: n windows together scatter √n times less than one.
    So on a noisy machine shares follow large changes soon, small ones after many windows, and settle. The gain itself
    is not compared with the noise: of a rank whose time is mostly fixed, it is a small part of what will be gained.

    Args:
        runs: the present one last, with at least one window. Every rank passes the same numbers, so all make
            the same decision.
        noise: of one window, by `noise_of`.
        fixed: for each rank, seconds that do not depend on its samples, by `fixed_seconds`; none when absent.
    """
    shares, windows = runs[-1].shares, runs[-1].windows
    assert windows
    assert all(len(window) == len(shares) for window in windows)
    fixed = [0.0] * len(shares) if fixed is None else fixed
    windows = windows[
        -(_since_change(runs[-2] if runs[1:] else None, runs[-1], rule, noise) or len(windows)) :
    ]
    count = 1
    while count <= len(windows):
        needed = rule.urgent if count < rule.dwell else rule.gain
        new, gain = _better(shares, windows[-count:], fixed, most, least)
        typical = _typical(windows[-count:])
        imbalance = max(typical) / fmean(typical)
        if gain >= needed and imbalance >= 1 + _SIGMAS * noise * sqrt(2 / count):
            reversals = _reversals([*runs, Run(shares=new, windows=[])], rule, noise)
            if reversals:
                new = _halfway(shares, new)
            slower = new == shares or _was_slower(runs, new, typical, log(rule.gain) + _SIGMAS * noise)
            if not slower and count >= _patience(reversals, rule):
                return new
        count = max(rule.dwell, 2 * count)
    return None


def _was_slower(runs: Sequence[Run], new: Sequence[int], typical: Sequence[float], alike: float) -> bool:
    """Whether a step took longer with these shares, or with some on the way to them.

    Those on the way count if they came after a run with the present shares and the same times, but for a factor of
    exp(`alike`): then no rank has changed its speed since.
    """
    now = runs[-1].shares
    earlier = [run for run in runs[:-1] if run.windows]
    known = [run for run in earlier if run.shares == tuple(new)][-1:]
    for index, run in enumerate(earlier):
        pairs = zip(_typical(run.windows), typical, strict=True)
        if run.shares == now and all(abs(log(then / time)) <= alike for then, time in pairs):
            known += [
                each
                for each in earlier[index + 1 :]
                if each.shares != now
                and all(min(a, c) <= b <= max(a, c) for a, b, c in zip(now, each.shares, new, strict=True))
            ]
            break
    return any(max(_typical(run.windows)) >= max(typical) for run in known)


def _patience(reversals: int, rule: Adjust) -> int:
    return min(rule.dwell * 2**reversals, _REMEMBERED) if reversals else 1


def _reversals(runs: Sequence[Run], rule: Adjust, noise: float) -> int:
    """How often shares have gone back and forth, up to the last of the runs; less after each that lasted."""
    count = 0
    for before, run, after in zip(runs, runs[1:], runs[2:], strict=False):
        there, back = (
            [b - a for a, b in zip(old.shares, new.shares, strict=True)]
            for old, new in ((before, run), (run, after))
        )
        back_again = sum(a * b for a, b in zip(there, back, strict=True)) < 0
        if len(run.windows) > _BRIEF * max(rule.dwell, _patience(count, rule)):
            count = max(0, count - 1)
        elif (count or back_again) and _since_change(before, run, rule, noise) >= rule.dwell:
            count = 0
        elif back_again and max(map(abs, back)) >= _CORRECTION * max(map(abs, there)):
            count += 1
    return count


def _since_change(before: Run | None, run: Run, rule: Adjust, noise: float) -> int:
    """For how many of the last windows of a run some rank has had another speed; 0 if none has."""
    windows = run.windows
    splits = [
        (run.shares, windows[-count - _BASELINE : -count], windows[-count:])
        for count in range(1, min(len(windows), _BASELINE))
    ]
    if before is not None and before.windows and windows:
        splits.append((before.shares, before.windows[-_RECENT:], windows))
    best, since = 0.0, 0
    for shares, old, new in splits:
        scatter = sqrt(1 / len(old) + 1 / len(new))
        change = _unexplained(shares, _typical(old), run.shares, _typical(new))
        if change >= max(rule.urgent, 1 + _SIGMAS * noise * scatter) and log(change) / scatter > best:
            best, since = log(change) / scatter, len(new)
    return since


def _unexplained(
    old: Sequence[int], old_times: Sequence[float], new: Sequence[int], new_times: Sequence[float]
) -> float:
    """The factor by which a rank without more samples became slower than one without fewer; at most 1 if none did.

    However times grow with samples, that is a change of some rank's speed. One of all ranks together does not matter.
    """
    moves = [b - a for a, b in zip(old, new, strict=True)]
    factors = [b / a for a, b in zip(old_times, new_times, strict=True)]
    slower = max((own for own, move in zip(factors, moves, strict=True) if move <= 0), default=1.0)
    return slower / min((own for own, move in zip(factors, moves, strict=True) if move >= 0), default=slower)


def _halfway(shares: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """Between the two, with the same sum; where a half is left over, ranks keep what they have."""
    moves = [n - s for s, n in zip(shares, new, strict=True)]
    half = [int(move / 2) for move in moves]
    missing = -sum(half)
    for rank, move in enumerate(moves):
        if missing and move % 2 and move * missing > 0:
            half[rank] += 1 if missing > 0 else -1
            missing += -1 if missing > 0 else 1
    return tuple(s + move for s, move in zip(shares, half, strict=True))


def fixed_seconds(
    runs: Sequence[Run], *, noise: float, known: Sequence[float] | None = None
) -> tuple[float, ...]:
    """For each rank, the part of its time that does not depend on its samples, as far as that is certain.

    That is `known`, or what a rank's time with other samples shows beyond the noise: too little rather than too much.

    Args:
        runs: the present one last. A rank's speed may have changed inside a run, so only its last windows count.
        noise: of one window, by `noise_of`.
        known: seconds that were measured to be fixed, such as those of the optimizer.
    """
    now = runs[-1]
    known = [0.0] * len(now.shares) if known is None else known
    current = now.windows[-_RECENT:]
    largest = [_MOST_FIXED * time for time in _typical(current)]
    result = list(known)
    for run in runs[-1 - _RECENT : -1]:
        before = run.windows[-_RECENT:]
        if not before:
            continue
        for rank, (then, time) in enumerate(zip(_typical(before), _typical(current), strict=True)):
            more = now.shares[rank] - run.shares[rank]
            if more == 0 or (time - then) / more <= 0:  # then its speed has changed
                continue
            parts = then * now.shares[rank], time * run.shares[rank]
            scatter = noise * hypot(parts[0] / sqrt(len(before)), parts[1] / sqrt(len(current))) / abs(more)
            certain = (parts[0] - parts[1]) / more - 2 * scatter
            result[rank] = max(result[rank], min(certain, largest[rank]))
    return tuple(result)


def without_waiting(
    seconds: Sequence[float], updates: Sequence[float], forwards: Sequence[float]
) -> tuple[float, ...]:
    """Own seconds of a step where collectives that wait for other ranks slow down a backward pass, as on GPUs.

    The slowest rank waits for nobody, so the smallest ratio of backward to forward pass is true, and holds for all.

    Args:
        seconds: for each rank what was measured.
        updates: those of its optimizer.
        forwards: those of its forward passes; 0 where unknown, and then nothing is changed.
    """
    if not all(forward > 0 for forward in forwards):
        return tuple(seconds)
    parts = list(zip(seconds, updates, forwards, strict=True))
    ratio = min(max(0.0, own - update - forward) / forward for own, update, forward in parts)
    return tuple(min(own, update + forward * (1 + ratio)) for own, update, forward in parts)


def noise_of(runs: Sequence[Sequence[Sequence[float]]]) -> float:
    """The relative scatter of one window's time on the noisiest rank.

    Args:
        runs: windows as in `rebalance`, in one list for each time that the shares were the same.
    """
    changes: list[list[float]] = []
    for run in runs:
        for before, after in pairwise(run):
            # A change of all ranks together does not matter to their shares.
            together = sum(after) / sum(before)
            changes.append([log(b / a / together) ** 2 for a, b in zip(before, after, strict=True)])
    if not changes:  # until something is known, only the first window counts
        return 0.0 if sum(map(len, runs)) <= 1 else inf
    changes = changes[-_REMEMBERED:]
    kept = max(1, len(changes) - max(2, len(changes) // 8))  # the largest few may be changes of speed
    squares = max(fmean(sorted(own)[:kept]) for own in zip(*changes, strict=True))
    # The common part is not independent of the ranks' own: with few ranks it takes away more of their scatter.
    ranks = len(changes[0])
    return sqrt(squares / 2 * ranks / max(ranks - 1, 1))


def _typical(windows: Sequence[Sequence[float]]) -> list[float]:
    return [median(times) for times in zip(*windows, strict=True)]


def _better(
    shares: Sequence[int],
    windows: Sequence[Sequence[float]],
    fixed: Sequence[float],
    most: Sequence[int | None] | None,
    least: int,
) -> tuple[tuple[int, ...], float]:
    """The best shares for these windows, and how much faster they would have made the slowest rank in at least half."""
    held = [max(share, 1) for share in shares]
    # Above 0 also in a window that was faster than what is known to be fixed.
    fixed = [min(own, 0.9 * min(times)) for own, *times in zip(fixed, *windows, strict=True)]
    each = [(t - own) / n for t, own, n in zip(_typical(windows), fixed, held, strict=True)]
    new = share_batch(sum(shares), each, fixed=fixed, most=most, least=least)
    gains = [
        max(seconds)
        / max(own + (s - own) / h * n for s, own, h, n in zip(seconds, fixed, held, new, strict=True))
        for seconds in windows
    ]
    return new, 1.0 if new == tuple(shares) else median_low(gains)
