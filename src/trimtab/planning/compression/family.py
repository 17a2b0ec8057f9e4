"""Which family of compression serves a job on this link: the one predicted fastest among those that do no harm.

Pure functions of what was measured. A *family* is a set of settings whose errors are of one kind, and so
share a budget: bits alone (unbiased), bits with error feedback, PowerSGD's ranks. What does harm depends on the
optimizer: one that scales every value by its own size, as Adam does, makes the small values of a block as
important as the large ones, and rounding drowns the small ones first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

BITS, BITS_FEEDBACK, POWERSGD = "bits", "bits-feedback", "powersgd"
BITS_SCALED = "bits-scaled"
"""For optimizers that scale every value by its own size."""

SGD, ADAMW = "SGD", "AdamW"

SAME = 0.1
"""Where bits alone take at most this much longer than the fastest family, they are taken: they have the smaller
error in each step, and owe nothing."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Settings whose errors are of one kind, and so share one budget."""

    stochastic: bool
    error_feedback: bool
    reference: int
    """The budget is the error of these bits for every layer."""

    limit: float
    """The most that a layer's error may be, over its own gradient."""

    expected: int
    """About the mean bits that plans come to: what its exchange is timed with."""

    block: int = 1024
    """Values that share a range."""

    relative: bool = False
    """Whether a layer's error counts against its own gradient, and each of its values alike."""


FAMILIES = {
    BITS: Family(stochastic=True, error_feedback=False, reference=4, limit=2.0, expected=3),
    # What one step leaves out the next one sends: so rounding to nearest does least, and 2 bits serve. At 1
    # bit the error is several times the values, and what is owed would never be paid back. (Clipping ranges
    # makes errors smaller still, but large values late: SGD with momentum suffers more than it gains.)
    BITS_FEEDBACK: Family(stochastic=False, error_feedback=True, reference=2, limit=2.0, expected=2),
    # Adam divides by the size of a value, to which the rounding of its block is added: a small value among large
    # ones hardly moves any more. Short blocks have few large ones. Feedback is no help: what is owed comes as
    # rarely and as large as it is rounded.
    BITS_SCALED: Family(
        stochastic=True, error_feedback=False, reference=3, limit=2.0, expected=3, block=128, relative=True
    ),
}

AT_FIRST = BITS_SCALED
"""Until the optimizer is known: it serves them all."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known of a family's effect on the loss."""

    family: str
    setting: str
    """In which setting it was tried: budgets are set by its error."""

    optimizer: str
    """With which it was trained: `SGD` stands for those that take values as they come, `ADAMW` for all others."""

    passed: bool
    """Whether its loss could not be told from fp32's."""

    evidence: str
    """The committed result that says so."""


_TRAINED, _ON_A_LINK = "benchmarks/results/adaptive.json", "benchmarks/results/ddp-100mbit-untrained.json"
_TWO_BITS = "2 bits, rounded to nearest"

LOSS_BENCH = (
    Verdict(family=BITS, setting="4 bits", optimizer=SGD, passed=True, evidence=_TRAINED),
    Verdict(family=BITS_FEEDBACK, setting=_TWO_BITS, optimizer=SGD, passed=True, evidence=_TRAINED),
    Verdict(family=BITS_FEEDBACK, setting=_TWO_BITS, optimizer=ADAMW, passed=False, evidence=_TRAINED),
    Verdict(
        family=BITS_SCALED, setting="3 bits in blocks of 128", optimizer=ADAMW, passed=True, evidence=_TRAINED
    ),
    Verdict(family=POWERSGD, setting="rank 4", optimizer=ADAMW, passed=False, evidence=_ON_A_LINK),
)
"""Families that were tried. One that is not here, or did not pass, is never picked."""


@dataclass(frozen=True, kw_only=True)
class FamilyCandidate:
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


def passed_families(verdicts: Sequence[Verdict] = LOSS_BENCH, *, optimizer: str = SGD) -> frozenset[str]:
    """The families whose loss could not be told from fp32's under an optimizer."""
    return frozenset(v.family for v in verdicts if v.passed and v.optimizer == optimizer)


def choose_family(
    candidates: Sequence[FamilyCandidate], *, passed: Collection[str] | None = None
) -> FamilyChoice:
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


def _timed(candidate: FamilyCandidate) -> str:
    return f"{candidate.seconds * 1e3:.3g} ms a step ({candidate.how})"
