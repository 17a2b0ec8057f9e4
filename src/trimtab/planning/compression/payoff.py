"""Whether compression pays on this link: a pure function of measured exchanges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trimtab.planning.compression.family import FamilyCandidate, choose_family
from trimtab.predict.exchange import Exchange

MAX_TIME_RATIO = 0.85
"""Compress when the exchange takes at most this fraction of the plain one: a smaller gain is within
the variation of steps, and exact gradients are worth more."""

KEEP_MARGIN = 0.10
"""How much the ratio must pass that limit by before a decision of an earlier run is reversed: a measurement that
varies from run to run must not turn the same job's compression on and off."""

MIN_SAVED_S = 5e-4
"""And when it saves at least this many seconds a step: a small model's exchange is all latency."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether to compress, and why."""

    compress: bool
    gain: float
    """Predicted plain exchange time over compressed exchange time."""

    reason: str


def is_close(exchanges: Mapping[str, Exchange]) -> bool:
    """Whether the measurement is so near the limit that another one might decide otherwise."""
    ratio = min(exchange.compressed_s / exchange.plain_s for exchange in exchanges.values())
    return abs(ratio - MAX_TIME_RATIO) <= KEEP_MARGIN


def decide(exchange: Exchange, gradient_bytes: int, before: bool | None = None) -> Decision:
    """Compress exactly when it makes the exchange of the job's gradients clearly shorter.

    `before` is what an earlier run of the same job decided; None if there was none.
    """
    job = exchange.of(gradient_bytes)
    plain_ms, compressed_ms = job.plain_s * 1e3, job.compressed_s * 1e3
    gain = exchange.plain_s / exchange.compressed_s
    margin = {None: 0.0, True: KEEP_MARGIN, False: -KEEP_MARGIN}[before]
    clearly = exchange.compressed_s <= (MAX_TIME_RATIO + margin) * exchange.plain_s
    compress = clearly and plain_ms - compressed_ms >= MIN_SAVED_S * 1e3
    times_in_words = (
        f"{gradient_bytes / 1e6:.0f} MB of gradients a step take {plain_ms:.0f} ms by plain all-reduce "
        f"({exchange.gbit_per_s:.2g} Gbit/s) and {compressed_ms:.0f} ms in {exchange.bits} bits"
    )
    if compress:
        reason = (
            f"compressing: {plain_ms:.0f} -> {compressed_ms:.0f} ms a step, {exchange.bits} bits; the link is the "
            f"bottleneck: {times_in_words}, predicted {gain:.1f}x shorter exchange"
        )
    else:
        reason = (
            f"not compressing: the link is not the bottleneck ({plain_ms:.0f} ms a step); {times_in_words}; "
            "compression would not pay, so it stays off"
        )
    return Decision(compress=compress, gain=gain, reason=reason)


def decide_shared_memory(exchange: Exchange, gradient_bytes: int) -> Decision:
    """Ranks of one host: whether exact sums through shared memory are faster than the backend's all-reduce."""
    job = exchange.of(gradient_bytes)
    times_in_words = (
        f"{gradient_bytes / 1e6:.0f} MB of gradients a step take {job.plain_s * 1e3:.0f} ms by plain all-reduce and "
        f"{job.compressed_s * 1e3:.0f} ms through shared memory"
    )
    shared = exchange.compressed_s < exchange.plain_s
    way = "through shared memory" if shared else "over sockets"
    reason = f"all ranks are on one host: gradients are summed exactly, {way} ({times_in_words})"
    return Decision(compress=shared, gain=exchange.plain_s / exchange.compressed_s, reason=reason)


def decide_weights(exchange: Exchange, weight_bytes: int) -> Decision:
    """FSDP2: whether gathering the weights in fewer bits makes that clearly shorter, as `decide` has it."""
    job = exchange.of(weight_bytes)
    saved_s = job.plain_s - job.compressed_s
    pays = exchange.compressed_s <= MAX_TIME_RATIO * exchange.plain_s and saved_s >= MIN_SAVED_S
    times_in_words = (
        f"{weight_bytes / 1e6:.0f} MB take {job.plain_s * 1e3:.0f} ms exactly and {job.compressed_s * 1e3:.0f} ms in "
        f"{exchange.bits} bits"
    )
    how = f"in {exchange.bits} bits" if pays else "exactly"
    return Decision(
        compress=pays,
        gain=exchange.plain_s / exchange.compressed_s,
        reason=f"weights are gathered {how} ({times_in_words})",
    )


def decide_family(
    exchanges: Mapping[str, Exchange], gradient_bytes: int, before: bool | None = None
) -> tuple[str, Decision]:
    """The fastest of the families that were timed on this link, and whether it pays.

    All ranks must pass the same numbers, also for `work_s`.
    """
    candidates = [
        FamilyCandidate(
            family=name,
            seconds=exchange.of(gradient_bytes).cost_s,
            how=f"measured in {exchange.bits} bits",
        )
        for name, exchange in exchanges.items()
    ]
    choice = choose_family(candidates, passed=exchanges.keys())
    decision = decide(exchanges[choice.family], gradient_bytes, before)
    if decision.compress:
        reason = f"{decision.reason}; bits are chosen per layer while training runs: {choice.reason}"
        decision = replace(decision, reason=reason)
    return choice.family, decision
