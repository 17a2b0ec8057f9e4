"""Which family of compression serves a job on this link: the one predicted fastest among those that do no harm.

Pure functions of what was measured. A *family* is a set of settings whose errors are of one kind, and so
share a budget: bits alone (unbiased), bits with error feedback, PowerSGD's ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from trimtab.plan.bits import Assignment

BITS, BITS_FEEDBACK, POWERSGD = "bits", "bits-feedback", "powersgd"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known of a family's effect on the loss."""

    family: str
    setting: str
    """In which setting it was tried: budgets are set by its error."""

    passed: bool
    """Whether its loss could not be told from fp32's."""

    evidence: str
    """The committed result that says so."""


LOSS_BENCH = (
    Verdict(family=BITS, setting="4 bits", passed=True, evidence="benchmarks/results/loss.json"),
    Verdict(family=BITS_FEEDBACK, setting="2 bits", passed=True, evidence="benchmarks/results/loss.json"),
    Verdict(family=POWERSGD, setting="rank 4", passed=False, evidence="benchmarks/results/ddp-100mbit.json"),
)
"""Families that were tried. One that is not here, or did not pass, is never picked."""


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """What the job's own collectives take: measured, with payloads of at least two sizes."""

    s_per_byte: float
    """Seconds for each further byte of a rank's payload."""

    latency_s: float
    """Seconds that one round takes however little it carries."""

    def seconds(self, nbytes: float, rounds: int) -> float:
        return rounds * self.latency_s + nbytes * self.s_per_byte


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A family as it would run here."""

    family: str
    nbytes: float
    """Payload of a step: what is to be reduced, however often the collective passes it on."""

    compute_s: float
    """Encoding, decoding, multiplying: what a step takes besides sending."""

    rounds: int
    """Collectives one after another in a step."""


@dataclass(frozen=True, kw_only=True)
class FamilyChoice:
    """The family, what it is predicted to take, and why in words."""

    family: str
    seconds: float
    reason: str


def bits_candidate(
    family: str,
    assignment: Assignment | float,
    *,
    values: int,
    raw_bytes: int,
    codec_s_per_value: float,
    rounds: int,
) -> Candidate:
    """A family of bits: the bytes of an assignment whose costs are bytes (or that number itself), beside
    `raw_bytes` of parameters that travel as they are. `codec_s_per_value` covers encoding, decoding and,
    with error feedback, remembering.
    """
    encoded = assignment if isinstance(assignment, int | float) else assignment.cost
    return Candidate(
        family=family,
        nbytes=encoded + raw_bytes,
        compute_s=values * codec_s_per_value,
        rounds=rounds,
    )


def powersgd_candidate(
    shapes: Sequence[tuple[int, int]],
    rank: int,
    *,
    raw_bytes: int,
    flop_per_s: float,
    rounds: int,
) -> Candidate:
    """PowerSGD at one rank over matrices of these shapes: fp32 factors in two rounds, three thin products each."""
    ranks = [min(rank, *shape) for shape in shapes]
    factors = sum(r * (rows + columns) for r, (rows, columns) in zip(ranks, shapes, strict=True))
    flop = sum(3 * 2 * r * rows * columns for r, (rows, columns) in zip(ranks, shapes, strict=True))
    return Candidate(
        family=POWERSGD,
        nbytes=4 * factors + raw_bytes,
        compute_s=flop / flop_per_s,
        rounds=2 * rounds,
    )


def passed_families(verdicts: Sequence[Verdict] = LOSS_BENCH) -> frozenset[str]:
    """The families whose loss could not be told from fp32's."""
    return frozenset(verdict.family for verdict in verdicts if verdict.passed)


def choose_family(
    candidates: Sequence[Candidate], link: LinkCost, *, passed: Collection[str] | None = None
) -> FamilyChoice:
    """The candidate predicted fastest on this link among the families that passed the loss bench.

    Raises:
        ValueError: when no candidate is of a family that passed.
    """
    allowed = passed_families() if passed is None else passed
    times = [(link.seconds(c.nbytes, c.rounds) + c.compute_s, c) for c in candidates]
    ranked = sorted((entry for entry in times if entry[1].family in allowed), key=lambda entry: entry[0])
    if not ranked:
        tried = ", ".join(c.family for c in candidates) or "nothing"
        raise ValueError(
            f"none of the families {tried} passed the loss bench ({', '.join(sorted(allowed))} did)"
        )
    seconds, best = ranked[0]
    said = f"{best.family} is predicted fastest on this link: {_timed(seconds, best)}"
    others = [f"{c.family} {_timed(s, c)}" for s, c in ranked[1:]]
    left_out = [
        f"{c.family} ({s * 1e3:.3g} ms) is left out: its loss was not shown to match fp32's"
        for s, c in times
        if c.family not in allowed
    ]
    return FamilyChoice(family=best.family, seconds=seconds, reason="; ".join([said, *others, *left_out]))


def _timed(seconds: float, candidate: Candidate) -> str:
    return (
        f"{seconds * 1e3:.3g} ms a step, {candidate.compute_s * 1e3:.3g} ms of it for the codec, "
        f"{candidate.nbytes / 1e6:.3g} MB"
    )
