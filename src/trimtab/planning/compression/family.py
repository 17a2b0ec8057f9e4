"""Which family of compression serves a job on this link: the one predicted fastest among those that do no harm.

Pure functions of what was measured. A *family* is a set of settings whose errors are of one kind, and so
share a budget: bits alone (unbiased), bits with error feedback, PowerSGD's ranks. What does harm depends on the
optimiser: one that scales every value by its own size, as Adam does, makes the small values of a block as
important as the large ones, and rounding drowns the small ones first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from trimtab.planning.compression.payoff import Exchange

BITS, BITS_FEEDBACK, POWERSGD = "bits", "bits-feedback", "powersgd"
BITS_SCALED = "bits-scaled"
"""For optimisers that scale every value by its own size."""

SGD, ADAMW = "SGD", "AdamW"

SAME = 0.1
"""Where bits alone take at most this much longer than the fastest family, they are taken: they have the smaller
error in each step, and owe nothing."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known of a family's effect on the loss."""

    family: str
    setting: str
    """In which setting it was tried: budgets are set by its error."""

    optimiser: str
    """With which it was trained: `SGD` stands for those that take values as they come, `ADAMW` for all others."""

    passed: bool
    """Whether its loss could not be told from fp32's."""

    evidence: str
    """The committed result that says so."""


_TRAINED, _ON_A_LINK = "benchmarks/results/adaptive.json", "benchmarks/results/ddp-100mbit-untrained.json"
_TWO_BITS = "2 bits, rounded to nearest"

LOSS_BENCH = (
    Verdict(family=BITS, setting="4 bits", optimiser=SGD, passed=True, evidence=_TRAINED),
    Verdict(family=BITS_FEEDBACK, setting=_TWO_BITS, optimiser=SGD, passed=True, evidence=_TRAINED),
    Verdict(family=BITS_FEEDBACK, setting=_TWO_BITS, optimiser=ADAMW, passed=False, evidence=_TRAINED),
    Verdict(
        family=BITS_SCALED, setting="3 bits in blocks of 128", optimiser=ADAMW, passed=True, evidence=_TRAINED
    ),
    Verdict(family=POWERSGD, setting="rank 4", optimiser=ADAMW, passed=False, evidence=_ON_A_LINK),
)
"""Families that were tried. One that is not here, or did not pass, is never picked."""


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """What the job's own collectives take, as a function of a rank's payload."""

    s_per_byte: float
    """Seconds for each further byte of what is to be reduced."""

    latency_s: float
    """Seconds that one round takes however little it carries."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A family as it would run here."""

    family: str
    seconds: float
    """Of a step's exchange: encoding, sending, decoding."""

    how: str
    """Where the seconds come from, in words."""


@dataclass(frozen=True, kw_only=True)
class FamilyChoice:
    """The family, what it is predicted to take, and why in words."""

    family: str
    seconds: float
    reason: str


def measured(family: str, exchange: Exchange, gradient_bytes: int) -> Candidate:
    """A family whose exchange was tried on this link, with a trial buffer in its typical bits."""
    seconds = exchange.compressed_s * gradient_bytes / exchange.nbytes
    return Candidate(family=family, seconds=seconds, how=f"measured in {exchange.bits} bits")


def predicted_bits(
    family: str, nbytes: float, link: LinkCost, *, values: int, codec_s_per_value: float, rounds: int = 1
) -> Candidate:
    """A family of bits, from the payload of a step and what encoding, decoding and (with feedback) remembering
    a value take."""
    compute_s = values * codec_s_per_value
    return _predicted(family, nbytes, link, compute_s=compute_s, rounds=rounds)


def predicted_powersgd(
    shapes: Sequence[tuple[int, int]],
    rank: int,
    link: LinkCost,
    *,
    raw_bytes: int,
    flop_per_s: float,
    rounds: int = 1,
) -> Candidate:
    """PowerSGD at one rank over matrices of these shapes: fp32 factors in two rounds, three thin products each."""
    ranks = [min(rank, *shape) for shape in shapes]
    factors = sum(r * (rows + columns) for r, (rows, columns) in zip(ranks, shapes, strict=True))
    flop = sum(3 * 2 * r * rows * columns for r, (rows, columns) in zip(ranks, shapes, strict=True))
    nbytes = 4 * factors + raw_bytes
    return _predicted(POWERSGD, nbytes, link, compute_s=flop / flop_per_s, rounds=2 * rounds)


def passed_families(verdicts: Sequence[Verdict] = LOSS_BENCH, *, optimiser: str = SGD) -> frozenset[str]:
    """The families whose loss could not be told from fp32's under an optimiser."""
    return frozenset(v.family for v in verdicts if v.passed and v.optimiser == optimiser)


def choose_family(candidates: Sequence[Candidate], *, passed: Collection[str] | None = None) -> FamilyChoice:
    """The candidate that takes least time among the families that passed the loss bench; see `SAME`.

    Raises:
        ValueError: when no candidate is of a family that passed.
    """
    allowed = passed_families() if passed is None else passed
    fitting = sorted((c for c in candidates if c.family in allowed), key=lambda c: (c.seconds, c.family))
    if not fitting:
        tried = ", ".join(c.family for c in candidates) or "nothing"
        raise ValueError(
            f"none of the families {tried} passed the loss bench ({', '.join(sorted(allowed))} did)"
        )
    best = fitting[0]
    said = [f"{best.family} takes least time on this link, {_timed(best)}"]
    gentle = next(
        (c for c in fitting[1:] if c.family == BITS and c.seconds <= (1 + SAME) * best.seconds), None
    )
    if gentle is not None:
        best = gentle
        said = [
            f"{best.family} is about as fast as any on this link and errs least in a step, {_timed(best)}"
        ]
    said += [f"{c.family} {_timed(c)}" for c in fitting if c is not best]
    said += [
        f"{c.family} {_timed(c)} is left out: its loss was not shown to match fp32's"
        for c in candidates
        if c.family not in allowed
    ]
    return FamilyChoice(family=best.family, seconds=best.seconds, reason="; ".join(said))


def _predicted(family: str, nbytes: float, link: LinkCost, *, compute_s: float, rounds: int) -> Candidate:
    seconds = rounds * link.latency_s + nbytes * link.s_per_byte + compute_s
    how = f"predicted: {nbytes / 1e6:.3g} MB, {compute_s * 1e3:.3g} ms of computing"
    return Candidate(family=family, seconds=seconds, how=how)


def _timed(candidate: Candidate) -> str:
    return f"{candidate.seconds * 1e3:.3g} ms a step ({candidate.how})"
