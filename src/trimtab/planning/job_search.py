"""The search for shares and precisions of a job whose gradients are exchanged in one way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import replace
from math import fsum, isfinite
from typing import TypeVar

from trimtab.cluster import Cluster
from trimtab.errors import TrimtabError
from trimtab.planning.job_candidate import JobCandidate
from trimtab.planning.precision.allocate import allocate, relieve
from trimtab.planning.precision.damage_curve import CLOSE
from trimtab.planning.precision.options import (
    Chosen,
    DoesNotFitError,
    Option,
    Options,
    damage_of,
    damages_of,
    lowered,
    own_only,
)
from trimtab.planning.precision.profile_tradeoffs import ProfileTradeoffs
from trimtab.planning.precision.starting_point import Lowerable
from trimtab.planning.roles import RoleLayout, alike, even, layout, replayed_job
from trimtab.planning.shares.with_precision import Shared, pace_for, quickest
from trimtab.predict.fsdp_units import Sharding
from trimtab.predict.operators.estimate import with_estimates
from trimtab.predict.operators.measured import Measured
from trimtab.predict.operators.measured_precisions import MeasuredPrecisions
from trimtab.predict.step_setting import StepSetting
from trimtab.workload import Workload

GAIN = 1.02
"""Precision or bits are lowered only where that makes the step faster by this factor."""

SLOWER = 1.02
"""Ranks are slow when they compute longer than the fastest ones by this factor."""

AHEAD = 0.1
"""Lowered ranks should finish before the others by this fraction of their time."""

FEW_CLASSES = 4
"""Up to so many device classes every move of a sample between two of them is tried."""

Search = TypeVar("Search", bound="JobSearch")


class JobSearch:
    """Searches shares and precisions for one model on one cluster."""

    def __init__(
        self,
        cluster: Cluster,
        workload: Workload,
        damages: Mapping[str, Mapping[str, float]],
        total: int,
        *,
        accumulate: int = 1,
        sharding: Sharding | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """
        Args:
            cluster: with its profile.
            damages: by operator and precision, for a rank that computes the whole batch. A precision with a damage
                that is not finite is never chosen.
            total: samples of a step, over all ranks.
            accumulate: micro-batches of a step, which divide it evenly.
            sharding: of a job under FSDP2; None for DDP.

        Raises:
            TrimtabError: a batch smaller than the number of ranks, an operator that was not measured.
        """
        assert cluster.profile is not None
        if total < cluster.world_size:
            raise TrimtabError(
                f"a batch of {total} is smaller than the {cluster.world_size} ranks of the cluster, and each takes at "
                f"least one sample; give --batch-size {cluster.world_size} or more"
            )
        unknown = sorted(damages.keys() - workload.settings.keys())
        if unknown:
            raise TrimtabError(
                f"{unknown[0]!r} is not an operator of {workload.model}; there are "
                f"{', '.join(list(workload.settings)[:8])}, ..."
            )
        self.profile = with_estimates(cluster, cluster.profile)
        self.cluster = replace(cluster, profile=self.profile)
        assert total % accumulate == 0
        self.workload, self.total, self.accumulate = workload, total // accumulate, accumulate
        self.measured = MeasuredPrecisions(Measured(workload, self.profile))
        finite = {
            name: {precision: value for precision, value in by.items() if isfinite(value)}
            for name, by in damages.items()
        }
        self.uncompressed = StepSetting(accumulate=accumulate, sharding=sharding)
        self.tradeoffs = ProfileTradeoffs(self.measured, self.cluster, finite, self.total, self.uncompressed)
        self.devices = [rank.device for rank in cluster.ranks()]
        self.counts = self.tradeoffs.counts
        self.alike = alike(workload)
        self.progress = progress
        self._done = 0
        self.shared_only: JobCandidate | None = None
        """With free shares: the best job that differs from plain DDP in its shares alone, if one was searched for."""

    def on(self: Search, cluster: Cluster) -> Search:
        """The search on other hosts with the same device classes; what was looked up is shared."""
        other = copy(self)
        other.cluster = replace(cluster, profile=self.profile)
        other.tradeoffs = self.tradeoffs.on(other.cluster)
        other.devices, other.counts = [rank.device for rank in cluster.ranks()], other.tradeoffs.counts
        return other

    def tick(self) -> None:
        self._done += 1
        self.progress(self._done, max(self._done, 12))

    def plain(self) -> JobCandidate:
        """Plain DDP or FSDP2: even shares, nothing lowered, nothing compressed."""
        candidate = self.even(self.uncompressed)
        self.tick()
        return candidate

    def even(self, setting: StepSetting) -> JobCandidate:
        """Even shares, nothing lowered."""
        job = layout(self.devices, even(self.devices, self.total))
        chosen: dict[str, Chosen] = {role: {} for role in job.devices}
        return self.candidate(job, chosen, 0.0, setting)

    def candidate(
        self, job: RoleLayout, chosen: dict[str, Chosen], damage: float, setting: StepSetting
    ) -> JobCandidate:
        replayed = replayed_job(self.measured, self.cluster, job, chosen, setting)
        return JobCandidate(job=job, chosen=chosen, replayed=replayed, damage=damage, setting=setting)

    def fits(self, candidate: JobCandidate) -> bool:
        """Whether every rank has the memory for it."""
        return all(
            (limit := self.tradeoffs.limits[device]) is None or candidate.replayed.peak(role) <= limit
            for role, device in candidate.job.devices.items()
        )

    # Fixed shares

    def fixed(self, setting: StepSetting) -> JobCandidate:
        """Equal shares; slow ranks, and ranks that do not fit, are lowered just enough."""
        if self.total % len(self.devices):
            below = self.total // len(self.devices) * len(self.devices)
            raise TrimtabError(
                f"a batch of {self.total} cannot be shared equally among {len(self.devices)} ranks; give --batch-size "
                f"{below or len(self.devices)} or {below + len(self.devices)}, or --batch free"
            )
        self.tradeoffs.setting = setting
        job = layout(self.devices, even(self.devices, self.total))
        plain = replayed_job(self.measured, self.cluster, job, {}, setting)
        roles = {
            name: self._lowerable(device, job.samples[name], job.counts[name])
            for name, device in job.devices.items()
            if device in self.slow(job) or not self._fits(device, job.samples[name])
        }
        roles = {name: role for name, role in roles.items() if role.damages or role.memory_bytes is not None}
        own = {
            name: own_only(self._options(device, job.samples[name])) for name, device in job.devices.items()
        }
        same = JobCandidate(job=job, chosen=own, replayed=plain, damage=0.0, setting=setting)
        if not roles:
            return same
        before = plain.step_s()
        fits = all(self._fits(job.devices[name], job.samples[name]) for name in roles)
        others = max((plain.compute_s(name) for name in job.devices if name not in roles), default=0.0)
        lowering = allocate(plain, roles, others_s=others, ahead=AHEAD)
        self.tick()
        if fits and before < GAIN * lowering.step_s:
            return self.candidate(job, own, 0.0, setting)
        return replace(same, chosen={**own, **lowering.chosen}, damage=lowering.damage)

    def slow(self, job: RoleLayout) -> set[str]:
        """Device classes that compute longer than the fastest, with the same samples."""
        own = {
            device: self.tradeoffs.menu(device, job.samples[job.of(device)[0]]).own_s
            for device in self.counts
        }
        return {device for device, seconds in own.items() if seconds > SLOWER * min(own.values())}

    def uniform_damage(self) -> float:
        """With even shares, of all slow ranks wholly at their fastest precisions."""
        job = layout(self.devices, even(self.devices, self.total))
        return self.largest_damage(job, self.slow(job))

    def largest_damage(self, job: RoleLayout, devices: Collection[str]) -> float:
        """Of all ranks of these device classes wholly at their fastest precisions."""
        return fsum(
            job.counts[name] * fsum(map(_fastest_damage, self._options(device, job.samples[name]).values()))
            for name, device in job.devices.items()
            if device in devices
        )

    # Free shares

    def free(self, setting: StepSetting, budget: float) -> JobCandidate:
        """Shares and precisions of all ranks: the fastest step whose damage is within the budget.

        Never slower than even shares, nor than lower precisions with even shares, where these fit.
        """
        self.tradeoffs.setting = setting
        self._refuse_too_large()
        try:
            sharing = self._searched(setting, 0.0)
        except DoesNotFitError:  # memory leaves no choice but to lower
            return self._relieved(self._searched(setting, budget))
        plain = self.even(setting)
        if plain.step_s < sharing.step_s and self.fits(plain):
            sharing = plain
        if setting == self.uncompressed:
            self.shared_only = sharing
        if not budget or sharing.step_s < GAIN * self._bound_s(sharing):
            return sharing
        lowering = self._searched(setting, budget)
        evenly = self.one_pass(setting, budget, evenly=True)
        if evenly is not None:
            lowering = min(lowering, evenly, key=lambda one: one.step_s)
        if not lowering.damage:
            return min(sharing, lowering, key=lambda one: one.step_s)
        relieved = self._relieved(lowering)
        return sharing if sharing.step_s < GAIN * relieved.step_s else relieved

    def one_pass(
        self,
        setting: StepSetting,
        budget: float,
        *,
        evenly: bool = False,
        like: JobCandidate | None = None,
    ) -> JobCandidate | None:
        """What a single pass finds: the fastest job within a damage budget; None if nothing fits.

        Args:
            evenly: whether shares are even.
            like: a job whose transfers slow its devices down about as much.
        """
        self.tradeoffs.setting = setting
        beside = {} if like is None else self._beside(like)
        shared: Shared | None
        if evenly:
            samples = even(self.devices, self.total)
            shared = pace_for(self.tradeoffs, samples, budget=budget, beside_s=beside)
        else:
            try:
                shared = quickest(self.tradeoffs, self.counts, self.total, budget=budget, beside_s=beside)
            except DoesNotFitError:
                shared = None
        return None if shared is None else self._realized(shared, beside, setting)

    def _bound_s(self, candidate: JobCandidate) -> float:
        """No lowering makes the step shorter: all ranks gain as much as the one that could gain most."""
        parts = [1.0]
        for role, device in candidate.job.devices.items():
            menu = self.tradeoffs.menu(device, candidate.job.samples[role])
            fastest = fsum(min(o.seconds for o in several) for several in menu.options.values())
            parts.append((menu.base_s + fastest) / menu.own_s if menu.own_s else 1.0)
        return candidate.replayed.bound_s(min(parts))

    def _refuse_too_large(self) -> None:
        """Refuse a batch that does not fit, however it is shared and lowered."""
        room = {device: self.tradeoffs.most(device, self.total) for device in self.counts}
        for device, most in room.items():
            if most < 1:
                need, have = self.tradeoffs.least_peak(device, 1), self.tradeoffs.limits[device] or 0
                raise DoesNotFitError(
                    f"{device}: a single sample needs {need / 2**30:.3g} GiB even with every operator at the precision "
                    f"that needs least, and it has {have / 2**30:.3g} GiB: {(need - have) / 2**20:,.2f} MiB are "
                    "missing; leave it out, or use a smaller model"
                )
        held = sum(self.counts[device] * most for device, most in room.items())
        if held < self.total:
            each = ", ".join(f"{most} on each of {self.counts[d]} {d}" for d, most in room.items())
            raise DoesNotFitError(
                f"a batch of {self.total} does not fit: even with every operator at the precision that keeps least "
                f"there is memory for {held} samples ({each}); {self.total - held} are too many: lower the batch size, "
                "or use more ranks"
            )

    def _searched(self, setting: StepSetting, budget: float) -> JobCandidate:
        beside: dict[str, float] = {}
        best: JobCandidate | None = None
        for _ in range(3):
            shared = quickest(self.tradeoffs, self.counts, self.total, budget=budget, beside_s=beside)
            candidate = self._realized(shared, beside, setting)
            self.tick()
            if best is None or candidate.step_s < best.step_s:
                best = candidate
            before, beside = beside, self._beside(candidate)
            if all(abs(beside[d] - before.get(d, 0.0)) < CLOSE * candidate.step_s for d in beside):
                break
        assert best is not None
        return self._moved(best, beside, setting, budget)

    def _moved(
        self, best: JobCandidate, beside: Mapping[str, float], setting: StepSetting, budget: float
    ) -> JobCandidate:
        """Move single samples between device classes as long as the replayed step becomes faster."""
        for _ in range(4):
            better: JobCandidate | None = None
            for giver, taker in self._moves(best):
                samples = best.with_one_moved(giver, taker)
                shared = samples and pace_for(self.tradeoffs, samples, budget=budget, beside_s=beside)
                if shared:
                    candidate = self._realized(shared, beside, setting)
                    if candidate.step_s < (better or best).step_s * (1 - CLOSE):
                        better = candidate
            self.tick()
            if better is None:
                return best
            best = better
        return best

    def _moves(self, best: JobCandidate) -> list[tuple[str, str]]:
        """Pairs of device classes between which a sample may move: of many classes only those that promise most."""
        if len(self.counts) <= FEW_CLASSES:
            return [(giver, taker) for giver in self.counts for taker in self.counts]
        times = sorted(best.replayed.timeline().roles, key=lambda role: -role.compute_s)
        devices = list(dict.fromkeys(best.job.devices[role.name] for role in times))
        return [(giver, taker) for giver in devices[:2] for taker in devices[-2:]]

    def _realized(self, shared: Shared, beside: Mapping[str, float], setting: StepSetting) -> JobCandidate:
        job = layout(self.devices, shared.samples)
        chosen = {
            role: self.tradeoffs.chosen(device, job.samples[role], shared.seconds - beside.get(device, 0.0))
            for role, device in job.devices.items()
        }
        return self.candidate(job, chosen, shared.damage, setting)

    def _beside(self, candidate: JobCandidate) -> dict[str, float]:
        """How much transfers and codec slow each device class down, in seconds of a step."""
        times = {role.name: role for role in candidate.replayed.timeline().roles}
        return {
            device: max(times[role].compute_s - times[role].own_s for role in candidate.job.of(device))
            for device in self.counts
        }

    def _relieved(self, candidate: JobCandidate) -> JobCandidate:
        """The same with every operator raised again that need not be lowered.

        With many device classes each has the least damage for its time already, and trying operator by operator would
        take hours.
        """
        if len(self.counts) > FEW_CLASSES:
            return candidate
        roles = {
            name: self._lowerable(device, candidate.job.samples[name], candidate.job.counts[name])
            for name, device in candidate.job.devices.items()
            if lowered(candidate.chosen[name])
        }
        relieved = relieve(
            candidate.replayed,
            roles,
            {name: candidate.chosen[name] for name in roles},
            pace_s=candidate.step_s,
        )
        self.tick()
        return replace(candidate, chosen={**candidate.chosen, **relieved.chosen}, damage=relieved.damage)

    # Shared by both

    def _options(self, device: str, samples: int) -> Options:
        return self.tradeoffs.menu(device, samples).options

    def _fits(self, device: str, samples: int) -> bool:
        return self.tradeoffs.fits(device, samples, {})

    def _lowerable(self, device: str, samples: int, ranks: int) -> Lowerable:
        return Lowerable(
            damages=damages_of(self._options(device, samples)),
            ranks=ranks,
            memory_bytes=self.tradeoffs.limits[device],
            alike=self.alike,
        )

    def damage_of(self, candidate: JobCandidate) -> float:
        return fsum(
            candidate.job.counts[name]
            * damage_of(self._options(device, candidate.job.samples[name]), candidate.chosen[name])
            for name, device in candidate.job.devices.items()
        )


def _fastest_damage(several: tuple[Option, ...]) -> float:
    return min(several, key=lambda option: (option.seconds, option.damage)).damage
