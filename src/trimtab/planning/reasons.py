"""Why a plan is as it is, in words with numbers: what each adjustment is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.planning.plan_search import GAIN, JobCandidate, PlanSearch
from trimtab.planning.precision.options import lowered
from trimtab.predict.replay.timeline import bottleneck


@dataclass(frozen=True, kw_only=True)
class Adjustment:
    """Something that a plan does, and what it is worth. Whatever adds to a plan appends one of these in `make_plan`."""

    name: str
    """Key of `Predicted.alone` and `Predicted.without`: "shares", "precision", "bits", "wrapper", ..., or ranks as
    "rank 3 (T4)"."""

    words: str
    """What the plan does, as a clause: "gradients are sent in 4 bits". Empty if another adjustment says it."""

    without_s: float | None = None
    """Predicted step with all else as planned; None if that job would not fit or does not exist."""

    alone_s: float | None = None
    """Predicted step of the best job that differs from plain DDP in this alone; plain DDP's if it gains nothing."""

    ranks: bool = False
    """Whether it stands for some of the ranks: what the step would be without them."""

    def reason(self, step_s: float) -> str:
        """In words, for a plan whose step takes so long; empty if there is nothing to say."""
        if self.without_s is None or (not self.words and not self.ranks):
            return self.words
        if not self.ranks:
            return f"{self.words}; without it the step {compared(self.without_s, step_s)}"
        if self.without_s >= step_s:
            return f"without {self.name} the step {compared(self.without_s, step_s)}"
        return (
            f"without {self.name} the step would take {shown(self.without_s)} instead of {shown(step_s)}: the "
            "job is faster without"
        )


def compared(other_s: float, step_s: float) -> str:
    """Another step time relative to the plan's: "is 38 % longer"."""
    percent = 100 * (other_s / step_s - 1)
    size = f"{abs(percent):.0f}" if abs(percent) >= 1 else f"{abs(percent):.1f}"
    return "is as long" if size == "0.0" else f"is {size} % {'longer' if percent > 0 else 'shorter'}"


def reasons_of(
    search: PlanSearch,
    plain: JobCandidate,
    chosen: JobCandidate,
    adjustments: Sequence[Adjustment],
    batch: str,
    bits: int | str | None,
    damage: float,
    budget: float,
) -> list[str]:
    """Why the plan is as it is; the conclusion comes last."""
    reasons: list[str] = []
    waits = {role.name: role for role in plain.replayed.timeline().roles}
    own = {name: time.own_s for name, time in waits.items()}
    slow, fast = max(own, key=lambda n: own[n]), min(own, key=lambda n: own[n])
    if own[slow] > 1.02 * own[fast]:
        reasons.append(
            f"with even shares {slow} computes {shown(own[slow])} a step and {fast} {shown(own[fast])}, so "
            f"that {fast} waits"
        )
    else:
        reasons.append("with even shares all ranks compute for about the same time")
    reasons += _worth(adjustments, chosen.step_s)
    reasons += _lowered_reasons(search, chosen, batch, damage, budget)
    reasons += _bits_reasons(search, chosen, bits)
    reasons += _alone(adjustments, plain.step_s)
    estimated = [d for d in search.counts if search.profile.devices[d].estimated]
    if estimated:
        reasons.append(f"the times of {', '.join(estimated)} are estimated from datasheets, not measured")
    gain, wrapper = plain.step_s / chosen.step_s, "DDP" if chosen.setting.sharding is None else "FSDP2"
    if gain >= 1.005:
        return [
            *reasons,
            f"a step is predicted to take {shown(chosen.step_s)} instead of plain {wrapper}'s {shown(plain.step_s)}: "
            f"{gain:.3g} times as fast",
        ]
    tried = "".join(
        f"; in {count} bits it would take {shown(candidate.step_s)}"
        for count, candidate in search.tried.items()
        if count is not None and candidate.bits != chosen.bits
    )
    where = bottleneck(plain.replayed.timeline(), advice=False)
    return [
        *reasons,
        f"nothing makes a step faster than plain {wrapper} here",
        f"plain {wrapper}'s step takes {shown(plain.step_s)}, most of it in {where}{tried}",
    ]


def _worth(adjustments: Sequence[Adjustment], step_s: float) -> list[str]:
    """What the plan does, and the step without it; what is said of some ranks is said once."""
    cards = {one.name: one for one in adjustments if one.ranks}
    reasons = []
    for one in adjustments:
        words = "" if one.ranks else one.reason(step_s)
        named = words.partition(": ")[0]
        if named in cards and (card_s := cards[named].without_s) is not None and card_s >= step_s:
            cards.pop(named)
            which = "the card" if named.startswith("rank ") else "these cards"
            words += f"; without {which} it {compared(card_s, step_s)}"
        reasons += [words] if words else []
    return reasons + [one.reason(step_s) for one in cards.values()]


def _alone(adjustments: Sequence[Adjustment], plain_s: float) -> list[str]:
    """What each adjustment alone would bring."""
    alone = {one.name: one.alone_s for one in adjustments if one.alone_s is not None}
    gaining = [f"{name} {shown(seconds)}" for name, seconds in alone.items() if seconds < plain_s]
    others = [name for name, seconds in alone.items() if seconds >= plain_s]
    return [
        *([f"each alone would bring the step to: {', '.join(gaining)}"] if gaining else []),
        *([f"alone, {' or '.join(others)} would gain nothing"] if others else []),
    ]


def _lowered_reasons(
    search: PlanSearch, candidate: JobCandidate, batch: str, damage: float, budget: float
) -> list[str]:
    lower = {name: lowered(chosen) for name, chosen in candidate.chosen.items()}
    if any(lower.values()):
        allowed = f", of {budget:.3g} allowed" if batch == "free" else ""
        reasons = [f"the damage of lower precision is {damage:.3g}{allowed}"]
        for name, own in lower.items():
            device = candidate.job.devices[name]
            if own and not search.tradeoffs.fits(device, candidate.job.samples[name], {}):
                reasons.append(f"{name} would not fit its memory with nothing lowered")
        return reasons
    if len(_unprobed(search, candidate)) == len(search.counts):
        shares = {device: candidate.job.samples[candidate.job.of(device)[0]] for device in search.counts}
        if any(any(search.measured.precisions(device, own).values()) for device, own in shares.items()):
            return [
                "nothing is lowered: what lower precision does to the gradient is not known here; measure it with "
                "`trimtab probe --damage`, or plan where the model's code is"
            ]
        return ["nothing is lowered: no lower precision was probed; see `trimtab probe --precision`"]
    if batch == "free" and not budget:
        return ["nothing is lowered: no damage is allowed"]
    if batch == "free":
        return [f"nothing is lowered: that would gain less than {GAIN - 1:.0%} beyond the shares"]
    return [f"nothing is lowered: no rank is slow, or lowering it would gain less than {GAIN - 1:.0%}"]


def _unprobed(search: PlanSearch, candidate: JobCandidate) -> list[str]:
    """Device classes on which no operator can be lowered."""
    return [
        device
        for device in search.counts
        if not search.tradeoffs.menu(device, candidate.job.samples[candidate.job.of(device)[0]]).options
    ]


def _bits_reasons(search: PlanSearch, candidate: JobCandidate, bits: int | str | None) -> list[str]:
    if bits != "auto" or len(search.devices) == 1 or candidate.bits is not None:
        return []  # bits that are used are an adjustment
    if not search.bits_measured():
        return ["gradients are sent uncompressed: the codec was not measured on every device class"]
    return [f"gradients are sent uncompressed: fewer bits would gain less than {GAIN - 1:.0%}"]


def shown(seconds: float) -> str:
    """A time for people."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
