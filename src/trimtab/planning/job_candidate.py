"""A job that could be planned: roles, precisions and what all ranks do alike, replayed."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.planning.precision.options import Chosen
from trimtab.planning.roles import RoleLayout
from trimtab.predict.replayed_job import ReplayedJob
from trimtab.predict.step_setting import StepSetting
from trimtab.wire_format import ADAPTIVE_BITS, ADAPTIVE_BLOCK


@dataclass(frozen=True, kw_only=True)
class JobCandidate:
    """A job that could be run, replayed."""

    job: RoleLayout
    """Its samples are those of a micro-batch."""

    chosen: dict[str, Chosen]
    replayed: ReplayedJob
    damage: float
    setting: StepSetting

    @property
    def bits(self) -> int | None:
        return self.setting.bits

    @property
    def adaptive(self) -> bool:
        """Whether bits adapt during training; `bits` is then what they are expected to be."""
        return self.setting.bits == ADAPTIVE_BITS and self.setting.block == ADAPTIVE_BLOCK

    @property
    def step_s(self) -> float:
        return self.replayed.step_s()

    def with_one_moved(self, giver: str, taker: str) -> dict[str, tuple[int, ...]] | None:
        """Shares with one sample moved from one device class to another; None where that is impossible."""
        if giver == taker:
            return None
        samples: dict[str, list[int]] = {}
        for role, count in self.job.ranks:
            samples.setdefault(self.job.devices[role], []).extend([self.job.samples[role]] * count)
        giving = samples[giver]
        giving[giving.index(max(giving))] -= 1
        if min(giving) < 1:
            return None
        taking = samples[taker]
        taking[taking.index(min(taking))] += 1
        return {device: tuple(sorted(own, reverse=True)) for device, own in samples.items()}
