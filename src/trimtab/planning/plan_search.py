"""The search for a plan: shares, precisions, bits, route and buckets of a job, together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

from trimtab.errors import TrimtabError
from trimtab.planning.compression.route import routes_to_try, sparing_route
from trimtab.planning.job_candidate import JobCandidate
from trimtab.planning.job_search import FEW_CLASSES, GAIN, JobSearch
from trimtab.planning.precision.damage_curve import CLOSE
from trimtab.predict.step_setting import StepSetting
from trimtab.wire_format import ADAPTIVE_BITS, ADAPTIVE_BLOCK, WEIGHT_BITS
from trimtab.workload.buckets import MIB

BUDGET = 0.01
"""Damage allowed with free shares: the expected square of the gradient's relative error. 0.01 moves the gradient of
a step by a tenth of its length, which is less than another batch would move it."""

BUCKET_CAPS_MB = (1.0, 2.5, 5.0, 12.5, 50.0, 100.0)
"""Sizes of DDP's buckets that are tried beside the job's own."""

MOST_BUCKETS = 128
"""Sizes that make more buckets than this are not tried: each costs messages, and the last one hardly matters."""

Bits = int | Literal["adaptive"] | None


class PlanSearch(JobSearch):
    """Searches plans for one model on one cluster."""

    def __init__(self, *args: Any, own_buckets: bool = False, **keywords: Any) -> None:
        """As `JobSearch`; with `own_buckets` no other bucket sizes than the workload's are tried."""
        super().__init__(*args, **keywords)
        self._own_buckets = own_buckets
        self.tried: dict[Bits, JobCandidate] = {}
        """The best candidate with each number of bits."""

    def choose(
        self, batch: Literal["fixed", "free"], bits: tuple[Bits, ...], budget: float, plain: JobCandidate
    ) -> JobCandidate:
        """The fastest candidate over these bits; fewer bits only where that gains. The first must be possible.

        Never slower than plain DDP, unless that does not fit or bits are given.
        """
        best: JobCandidate | None = None
        for count in sorted(bits, key=_expected, reverse=True):
            try:
                setting = self.setting(count)
                candidate = self.fixed(setting) if batch == "fixed" else self.free(setting, budget)
            except TrimtabError:
                if best is None:
                    raise
                continue  # the codec needs memory; without it there was enough
            if best is None or best.step_s >= GAIN * candidate.step_s:
                best = candidate
            self.tried[count] = candidate
        assert best is not None
        if best.step_s > plain.step_s and None in bits and self.fits(plain):
            best = plain  # the search is a heuristic; what is known to be better wins
        if self.uncompressed.sharding is not None:
            return best  # FSDP2 has no buckets, and its units have one number of bits
        bucketed = self._with_buckets(best)
        if batch == "free" and bucketed is not best and len(self.counts) <= FEW_CLASSES:
            # What is exposed of the exchange is another part of the step now, and so are the best shares.
            best = self.free(bucketed.setting, budget)
        if bucketed.step_s <= best.step_s:
            best = bucketed
        return self._with_more_bits(best) if None in bits else best

    def setting(self, bits: Bits) -> StepSetting:
        """The exchange in these bits, on the route that is fastest with even shares."""
        if bits is None:
            return self.uncompressed
        if bits == "adaptive":
            return self.routed(replace(self.uncompressed, bits=ADAPTIVE_BITS, block=ADAPTIVE_BLOCK))
        return self.routed(replace(self.uncompressed, bits=bits))

    def routed(self, compressed: StepSetting) -> StepSetting:
        """The setting on the route that is fastest with even shares.

        FSDP2 has a route of its own: there weights are gathered in fewer bits as well, where that gains.
        """
        if compressed.bits is None:
            return compressed
        if compressed.sharding is not None:
            if WEIGHT_BITS not in self.bits_measured():
                return compressed
            weights = replace(compressed, sharding=replace(compressed.sharding, weight_bits=WEIGHT_BITS))
            exact = replace(compressed, sharding=replace(compressed.sharding, weight_bits=None))
            return weights if self.even(exact).step_s >= GAIN * self.even(weights).step_s else exact
        routes = routes_to_try(self.cluster, self.profile, self.workload, compressed)
        settings = [replace(compressed, route=route) for route in routes]
        if len(settings) == 1:
            return settings[0]
        return min(settings, key=lambda setting: self.even(setting).step_s)

    def _with_buckets(self, candidate: JobCandidate) -> JobCandidate:
        """With buckets of another size, and with ranks behind slow links spared, where that gains."""
        if len(self.devices) == 1:
            return candidate
        whole = sum(p.tensor.nbytes for p in self.workload.parameters if p.trainable) / MIB
        caps: list[float | None] = [
            cap for cap in BUCKET_CAPS_MB if cap == BUCKET_CAPS_MB[-1] or whole <= MOST_BUCKETS * cap
        ]
        if self._own_buckets:
            caps = [None]

        def fastest(caps: Iterable[float | None], **changed: Any) -> JobCandidate:
            settings = (replace(candidate.setting, bucket_cap_mb=cap, **changed) for cap in caps)
            return min((self.with_setting(candidate, one) for one in settings), key=lambda one: one.step_s)

        best = fastest(caps)
        self.tick()
        route = None if candidate.bits is None else sparing_route(self.cluster, self.profile)
        if route is not None:
            own = best.setting.bucket_cap_mb
            sparing = fastest((None, *caps) if len(self.counts) <= FEW_CLASSES else (own,), route=route)
            best = sparing if best.step_s >= GAIN * sparing.step_s else best
            self.tick()
        return best if candidate.step_s >= GAIN * best.step_s and self.fits(best) else candidate

    def _with_more_bits(self, candidate: JobCandidate) -> JobCandidate:
        """With more bits for as many of the first buckets as is possible at the same pace: they have time."""
        if candidate.adaptive:
            return candidate  # every layer's bits are chosen from its gradients
        bits = candidate.bits
        more = min((b for b in self.bits_measured() if bits is not None and b > bits), default=None)
        if more is None:
            return candidate
        buckets = self.measured.operators.bucketed(candidate.setting.bucket_cap_mb).buckets
        compressed = {name for name, own in candidate.setting.bits_of(self.workload).items() if own}

        def raised(count: int) -> JobCandidate:
            names = [name for bucket in buckets[:count] for name in bucket.parameters if name in compressed]
            return self.with_setting(
                candidate, replace(candidate.setting, layer_bits=dict.fromkeys(names, more))
            )

        best = _last(
            len(buckets),
            raised,
            lambda one: one.step_s <= (1 + CLOSE) * candidate.step_s and self.fits(one),
        )
        self.tick()
        return best or candidate

    def with_setting(self, candidate: JobCandidate, setting: StepSetting) -> JobCandidate:
        """The same shares and precisions with another setting."""
        return self.candidate(candidate.job, candidate.chosen, candidate.damage, setting)

    def bits_measured(self) -> tuple[int, ...]:
        """The bits at which the codec was measured on every device class."""
        known = [set(self.profile.devices[d].codec) for d in self.counts if d in self.profile.devices]
        return tuple(sorted(int(b) for b in set.intersection(*known))) if known else ()


def _expected(bits: Bits) -> int:
    """Bits of a value, to sort by; those that adapt are expected to be so many."""
    return 32 if bits is None else ADAPTIVE_BITS if bits == "adaptive" else bits


def _last(
    count: int, made: Callable[[int], JobCandidate], allowed: Callable[[JobCandidate], bool]
) -> JobCandidate | None:
    """What is made of the largest number up to `count` that is allowed, by bisection; None if not even of 1."""
    best, low, high = None, 0, count + 1
    while high - low > 1:
        middle = (low + high) // 2
        candidate = made(middle)
        if allowed(candidate):
            best, low = candidate, middle
        else:
            high = middle
    return best


__all__ = ["BUDGET", "GAIN", "Bits", "JobCandidate", "PlanSearch"]
