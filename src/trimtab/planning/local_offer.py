"""What local steps would bring to a planned job, from its prediction. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from trimtab.planning.local_steps import TRIED_BITS, choose_local_steps, expected_loss
from trimtab.planning.plan import LocalRounds
from trimtab.planning.plan_search import JobCandidate, PlanSearch
from trimtab.planning.reasons import shown
from trimtab.predict.collectives import Placement
from trimtab.predict.replay.timeline import Span

OFFERED = 1.5
"""Local steps are another way to train, so they are mentioned only where a step would be this many times as fast."""


def local_offer(search: PlanSearch, chosen: JobCandidate, max_penalty: float) -> LocalRounds | None:
    """The rounds that local steps would take; None where they would gain little.

    Args:
        chosen: the planned job, which exchanges its gradients in every step.
        max_penalty: allowed relative increase of the loss.
    """
    tried = [bits for bits in TRIED_BITS if bits in search.bits_measured()]
    if chosen.setting.sharding is not None or len(search.devices) == 1 or not tried:
        return None
    compressed = {
        bits: search.with_setting(chosen, search.routed(replace(chosen.setting, bits=bits, layer_bits={})))
        for bits in tried
    }
    spans = {bits: candidate.replayed.timeline().spans for bits, candidate in compressed.items()}
    placement = Placement.on(search.cluster)
    workers = placement.hosts if 1 < placement.hosts < placement.world else placement.world
    choice = choose_local_steps(
        step_s=max(role.own_s for role in chosen.replayed.timeline().roles),
        exchange_s={
            bits: covered(span for span in own if span.lane == "wire") for bits, own in spans.items()
        },
        every_step_s=chosen.step_s,
        workers=workers,
        layers=sum(p.trainable for p in search.workload.parameters),
        max_penalty=max_penalty,
        work_s=_codec_seconds(spans[tried[0]]),
    )
    settings = choice.settings
    if settings is None or settings.bits is None or chosen.step_s < OFFERED * choice.step_s:
        return None
    return LocalRounds(
        every=settings.every,
        bits=settings.bits,
        fragments=settings.fragments,
        outer_lr=settings.outer_lr,
        outer_momentum=settings.outer_momentum,
        workers=workers,
        step_s=choice.step_s,
        penalty=choice.penalty,
    )


def in_words(rounds: LocalRounds) -> str:
    """As a reason of a plan."""
    return (
        f"with local steps (`trimtab run --local-steps auto`) a step would take {shown(rounds.step_s)}: "
        f"{rounds.workers} workers agree every {rounds.every} steps, in {rounds.bits} bits; "
        f"{expected_loss(rounds.workers, rounds.every, rounds.bits)}"
    )


def covered(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of the spans runs."""
    seconds = until = 0.0
    for span in sorted(spans, key=lambda one: one.start):
        seconds += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return seconds


def _codec_seconds(spans: Iterable[Span]) -> float:
    """Computing time of the codec on the rank that has most of it."""
    by_role: dict[int | None, float] = {}
    for span in spans:
        if span.lane == "codec":
            by_role[span.role] = by_role.get(span.role, 0.0) + span.end - span.start
    return max(by_role.values(), default=0.0)
