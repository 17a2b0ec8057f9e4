"""Which family of compression to use on this link: the fastest of those that do not harm the loss.

Pure functions of measurements. A *family* is a set of settings whose errors are of one kind, and so
share a budget: bits alone (unbiased), bits with error feedback, PowerSGD's ranks. Which of them do harm depends
on the optimizer: one that scales every value by its own size, as Adam does, makes the small values of a block
as important as the large ones, and rounding drowns the small ones first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trimtab.wire_format import ADAPTIVE_BITS, ADAPTIVE_BLOCK

BITS, BITS_FEEDBACK, POWERSGD = "bits", "bits-feedback", "powersgd"
BITS_SCALED = "bits-scaled"
"""For optimizers that scale every value by its own size."""

BITS_WIDE = "bits-wide"
"""For the same optimizers: more bytes and less work, faster where the codec takes longer than the link."""

SGD, ADAMW = "SGD", "AdamW"

LEAST_BITS = 2
"""Fewest bits of a layer, unless its family needs more."""

SAME = 0.1
"""Bits alone are preferred while they take at most this much longer than the fastest family: their error in a
step is smaller, and no error is carried over."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Settings whose errors are of one kind, and so share one budget."""

    stochastic: bool
    error_feedback: bool
    reference: int
    """The budget is the error of these bits for every layer."""

    limit: float
    """The largest error of a layer, relative to its own gradient."""

    expected: int
    """Roughly the mean bits that plans choose; its exchange is timed with these."""

    block: int = 1024
    """Values that share a range: the codec's block."""

    relative: bool = False
    """Whether a layer's error counts against its own gradient, and each of its values alike."""

    least_bits: int = LEAST_BITS


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
        stochastic=True,
        error_feedback=False,
        reference=3,
        limit=2.0,
        expected=ADAPTIVE_BITS,
        block=ADAPTIVE_BLOCK,
        relative=True,
    ),
    # In long blocks nothing below 4 bits passed with AdamW.
    BITS_WIDE: Family(
        stochastic=True,
        error_feedback=False,
        reference=4,
        limit=2.0,
        expected=4,
        relative=True,
        least_bits=4,
    ),
}

AT_FIRST = BITS_SCALED
"""Suits every optimizer: what routes are compared with."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known of a family's effect on the loss."""

    family: str
    setting: str
    """The setting that was trained with; budgets are set by its error."""

    optimizer: str
    """The optimizer of that training: `SGD` stands for those that take values as they come, `ADAMW` for all others."""

    passed: bool
    """Whether its loss was indistinguishable from fp32's."""

    evidence: str
    """The committed result that shows it."""


_TRAINED, _ON_A_LINK = "benchmarks/results/adaptive.json", "benchmarks/results/ddp-100mbit-untrained.json"
_TWO_BITS = "2 bits, rounded to nearest"

LOSS_BENCH = (
    Verdict(family=BITS, setting="4 bits", optimizer=SGD, passed=True, evidence=_TRAINED),
    Verdict(family=BITS_FEEDBACK, setting=_TWO_BITS, optimizer=SGD, passed=True, evidence=_TRAINED),
    Verdict(family=BITS_FEEDBACK, setting=_TWO_BITS, optimizer=ADAMW, passed=False, evidence=_TRAINED),
    Verdict(
        family=BITS_SCALED, setting="3 bits in blocks of 128", optimizer=ADAMW, passed=True, evidence=_TRAINED
    ),
    Verdict(family=BITS_WIDE, setting="4 bits", optimizer=ADAMW, passed=True, evidence=_TRAINED),
    Verdict(family=POWERSGD, setting="rank 4", optimizer=ADAMW, passed=False, evidence=_ON_A_LINK),
)
"""Families that were trained with. One that is missing here, or did not pass, is never chosen."""


@dataclass(frozen=True, kw_only=True)
class FamilyCandidate:
    """A family and the time it would take on this link."""

    family: str
    seconds: float
    """Time of a step's exchange: encoding, sending, decoding; work of a CPU counts twice (`Exchange.cost_s`)."""

    how: str
    """Where the time comes from, in words."""


@dataclass(frozen=True, kw_only=True)
class FamilyChoice:
    """The chosen family, its time, and the reason in words."""

    family: str
    seconds: float
    reason: str


def passed_families(verdicts: Sequence[Verdict] = LOSS_BENCH, *, optimizer: str = SGD) -> frozenset[str]:
    """The families whose loss was indistinguishable from fp32's with this optimizer."""
    return frozenset(v.family for v in verdicts if v.passed and v.optimizer == optimizer)


def choose_family(
    candidates: Sequence[FamilyCandidate], *, passed: Collection[str] | None = None
) -> FamilyChoice:
    """The fastest candidate among the families that passed the loss bench; see `SAME`.

    Raises:
        ValueError: when no candidate is of a family that passed.
    """
    allowed = passed_families() if passed is None else passed
    fitting = sorted((c for c in candidates if c.family in allowed), key=lambda c: (c.seconds, c.family))
    if not fitting:
        rejected = ", ".join(c.family for c in candidates) or "nothing"
        raise ValueError(
            f"none of the families {rejected} passed the loss bench ({', '.join(sorted(allowed))} did)"
        )
    best = fitting[0]
    reasons = [f"{best.family} takes least time on this link, {_timed(best)}"]
    gentle = next(
        (c for c in fitting[1:] if c.family == BITS and c.seconds <= (1 + SAME) * best.seconds), None
    )
    if gentle is not None:
        best = gentle
        reasons = [
            f"{best.family} is about as fast as any on this link and errs least in a step, {_timed(best)}"
        ]
    reasons += [f"{c.family} {_timed(c)}" for c in fitting if c is not best]
    reasons += [
        f"{c.family} {_timed(c)} is left out: its loss was not shown to match fp32's"
        for c in candidates
        if c.family not in allowed
    ]
    return FamilyChoice(family=best.family, seconds=best.seconds, reason="; ".join(reasons))


def _timed(candidate: FamilyCandidate) -> str:
    return f"{candidate.seconds * 1e3:.3g} ms a step ({candidate.how})"
