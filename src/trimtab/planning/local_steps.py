"""How often workers agree, in how many bits, in how many fragments, and how large an outer step is. Pure functions.

Three things limit it. The wire: what is sent in a round must fit the time of its steps. The worker: encoding, decoding
and the outer step take computing time from it, once in a round. The loss: the longer workers go their own ways, and the
more of them there are, the further the result is from that of training together. So a round is as short as wire and
worker allow.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from trimtab.errors import TrimtabError
from trimtab.local_settings import LocalSettings

WIRE_PART = 0.85
"""The part of a round that its exchange may take: beyond it, workers would wait for any variation."""

WORK_PART = 0.033
"""The part of a round's computing time that its exchange may take by itself. Beside the training, with which it shares
cores and caches, it costs about twice as much. With less, rounds are so long that the loss suffers."""

OVERLAPPED = 0.5
"""The part of a step during which DDP's exchange of gradients is hidden: most of the backward pass."""

PENALTY = {1: 0.0, 2: 0.0048, 4: 0.0137, 8: 0.0287}
"""Relative increase of the loss by number of workers, with rounds of 30 steps (published fits for 124 M parameters)."""

LARGE_BATCH = 0.4
"""The part of a single step that workers have in common from which the published penalties hold."""

NOISE = 20.0
"""With less in common the penalty grows evenly, to 1 and so many times the published one where nothing is. Chosen from
what was measured with 2 to 64 sequences a worker (docs/local-steps.md), which it fits to a factor of about two."""

REFERENCE_EVERY = 30
GROWTH = 0.5
"""The penalty grows with this power of the length of a round: assumed, between the constant of the published fits and
what a round of independent steps would do."""

COARSE_PENALTY = 0.002
"""What fewer than 4 bits add to the penalty; from the losses in docs/local-steps.md."""

OUTER_LR, MOMENTUM = 0.7, 0.5
"""Of the outer step; chosen by measurement (docs/local-steps.md)."""

LAST_PART = 0.1
"""The part of the gradients that is ready only when the backward pass ends, if no parameter is larger: DDP's last
buckets."""

TRIED_BITS = (4, 2)
SLOWER = 1.05
"""Exchanging every step is preferred while a step takes at most this many times the computation, or a local step."""

MAX_PENALTY = 0.01
"""The relative increase of the loss that is allowed by default."""

MOST_EVERY = 500
MOST_FRAGMENTS = 16
TURNS = 2
"""The delay of a fragment, in turns: so many may be under way."""


@dataclass(frozen=True, kw_only=True)
class LocalChoice:
    """Settings, or None where exchanging every step is as fast; with the reason in words."""

    settings: LocalSettings | None
    penalty: float
    """Expected relative increase of the loss."""

    step_s: float
    """Predicted time of a step."""

    reason: str


def require_penalty(verb: str, max_penalty: float) -> None:
    """Raise for a limit of the penalty that is none."""
    if not 0 < max_penalty < 1:
        raise TrimtabError(
            f"{verb}: max_penalty={max_penalty!r}: use a number between 0 and 1, such as {MAX_PENALTY}"
        )


def of_one_step(in_a_round: float, steps: int) -> float:
    """Agreement of single steps from that of rounds, in which common parts add up and noise cancels in part."""
    return in_a_round / (in_a_round + steps * (1 - in_a_round)) if in_a_round > 0 else 0.0


def penalty(workers: int, every: int, bits: int | None = 4, agreement: float = LARGE_BATCH) -> float:
    """Expected relative increase of the loss over training together.

    Args:
        agreement: the part of a single step that is common to all workers; by default that of large batches.
    """
    if workers < 2 or every < 2:
        return 0.0
    below = 1 << int(log2(workers))
    low, high = _known(below), _known(2 * below)
    at_reference = low + (high - low) * (workers / below - 1)
    coarse = 0.0 if bits is None or bits >= 4 else COARSE_PENALTY
    noise = 1 + NOISE * max(0.0, 1 - agreement / LARGE_BATCH)
    return float(at_reference * noise * (every / REFERENCE_EVERY) ** GROWTH + coarse)


def expected_loss(workers: int, every: int, bits: int | None = 4, agreement: float | None = None) -> str:
    """The penalty in words; without a measured agreement that of large batches."""
    if agreement is None:
        return f"the loss is expected to be {penalty(workers, every, bits):.1%} higher than DDP's, with large batches"
    return (
        f"the loss is expected to be {penalty(workers, every, bits, agreement):.1%} higher than DDP's: workers have "
        f"{agreement:.0%} of a step in common"
    )


def _known(workers: int) -> float:
    return PENALTY[workers] if workers in PENALTY else PENALTY[8] * workers / 8


def outer_rates(workers: int) -> tuple[float, float]:
    """Learning rate and momentum of the outer step; one worker alone needs none.

    Averaging the steps of workers averages their noise away: an optimizer that scales steps by the size of noisy
    gradients, as Adam does, then makes steps that are too short. The outer step makes up for that: a change that
    repeats itself moves the weights by 0.7 / (1 - 0.5) = 1.4 times its average. More is unstable.
    """
    return (OUTER_LR, MOMENTUM) if workers > 1 else (1.0, 0.0)


def choose_local_steps(
    *,
    step_s: float,
    exchange_s: dict[int, float],
    every_step_s: float,
    workers: int,
    layers: int,
    max_penalty: float = MAX_PENALTY,
    work_s: float = 0.0,
    agreement: float | None = None,
) -> LocalChoice:
    """The shortest round that wire and worker allow, in the bits with the lowest expected penalty.

    Where no such round is within the limit of the penalty, the bits whose steps are fastest in the longest rounds.

    Args:
        step_s: computation of the slowest worker's step.
        exchange_s: by bits, the time in which all weights' changes are exchanged, fragment after fragment.
        every_step_s: of a step that exchanges its gradients as `trimtab.compress` would.
        work_s: computing time that the exchange of all weights takes from the training.
        layers: groups of parameters that can be sent one after another.
        max_penalty: the relative increase of the loss that is allowed.
        agreement: measured, of single steps. Then a round whose penalty is too high is none: where the shortest one
            is, workers exchange every step.
    """
    if workers < 2:
        return LocalChoice(
            settings=None, penalty=0.0, step_s=step_s, reason="one worker: there is nobody to agree with"
        )
    if every_step_s <= SLOWER * step_s:
        return LocalChoice(
            settings=None,
            penalty=0.0,
            step_s=every_step_s,
            reason=f"exchanging every step takes {_ms(every_step_s)} where computing takes {_ms(step_s)}: local steps "
            "would gain nothing",
        )
    tried: list[tuple[bool, float, int, int, float]] = []
    for bits in TRIED_BITS:
        if bits not in exchange_s:
            continue
        most = longest_round(workers, max_penalty, bits, LARGE_BATCH if agreement is None else agreement)
        needed = max(2, ceil(max(exchange_s[bits] / (WIRE_PART * step_s), work_s / (WORK_PART * step_s))))
        every = min(needed, most)
        seconds = max(step_s + work_s / every, exchange_s[bits] / every)
        waits = needed > most
        expected = penalty(workers, every, bits, LARGE_BATCH if agreement is None else agreement)
        tried.append((waits, seconds if waits else expected, every, bits, seconds))
    if not tried:
        raise TrimtabError(f"local steps: the exchange was measured in none of {TRIED_BITS} bits")
    _, _, every, bits, seconds = min(tried, key=lambda one: one[:2])
    if every_step_s <= SLOWER * seconds:
        return LocalChoice(
            settings=None,
            penalty=0.0,
            step_s=every_step_s,
            reason=f"in rounds of {every} steps one would take {_ms(seconds)}, and exchanging every step takes "
            f"{_ms(every_step_s)}: not worth a higher loss",
        )
    expected = penalty(workers, every, bits, LARGE_BATCH if agreement is None else agreement)
    if agreement is not None and expected > max_penalty:
        return LocalChoice(
            settings=None,
            penalty=0.0,
            step_s=every_step_s,
            reason=f"workers have only {agreement:.1%} of a step in common, and even rounds of {every} steps would "
            f"increase the loss by {expected:.1%}, where {max_penalty:.1%} is allowed",
        )
    settings = local_settings(every, bits, workers, layers)
    return LocalChoice(
        settings=settings,
        penalty=expected,
        step_s=seconds,
        reason=f"a step takes {_ms(seconds)} where exchanging every step takes {_ms(every_step_s)} (all weights take "
        f"{_ms(exchange_s[bits])} on the wire and {_ms(work_s)} of computing); "
        f"{expected_loss(workers, every, bits, agreement)}",
    )


def every_step_seconds(step_s: float, exchange_s: float, work_s: float, largest: float = 0.0) -> float:
    """A step of DDP: its exchange is hidden behind the backward pass, but for what is ready last.

    Args:
        exchange_s: all gradients, nothing else going on.
        work_s: computing time that the exchange takes from the training.
        largest: the part of all values that the largest parameter has. Mostly it is an embedding, and ready last.
    """
    exposed = max(LAST_PART, largest) * exchange_s
    return step_s + work_s + max(exchange_s - OVERLAPPED * step_s, exposed)


def longest_round(
    workers: int, max_penalty: float, bits: int | None = 4, agreement: float = LARGE_BATCH
) -> int:
    """The longest round within a penalty, of at least 2 steps."""
    at_reference = penalty(workers, REFERENCE_EVERY, agreement=agreement)
    left = max(0.0, max_penalty - penalty(workers, REFERENCE_EVERY, bits, agreement) + at_reference)
    return max(2, min(MOST_EVERY, int(REFERENCE_EVERY * (left / at_reference) ** (1 / GROWTH))))


def local_settings(every: int, bits: int | None, workers: int, layers: int) -> LocalSettings:
    """Settings for rounds of a given length. Many fragments keep the wire busy all the time, and delays short.

    Turns are at least two steps apart, where the round has them, and about evenly: no time is lost to rounding.
    A slow exchange or a late worker that takes less than the delay holds nobody up.
    """
    lr, momentum = outer_rates(workers) if every > 1 else (1.0, 0.0)  # the mean: as DDP, for plain SGD
    fragments = max(1, min(layers, every // max(2, ceil(every / MOST_FRAGMENTS))))
    return LocalSettings(
        every=every,
        bits=bits,
        outer_lr=lr,
        outer_momentum=momentum,
        fragments=fragments,
        delay=default_delay(every, fragments),
    )


def default_delay(every: int, fragments: int) -> int:
    """Steps in which a fragment arrives: that of `TURNS` turns, or half a round if that is less, but one turn."""
    spacing = every // max(fragments, 1)
    return max(spacing, min(TURNS * spacing, every // 2)) if every > 1 else 0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
