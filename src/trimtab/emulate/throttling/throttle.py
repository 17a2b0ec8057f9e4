"""The mechanism that slows down CPU ranks, and what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trimtab.emulate.job_directory import Job
from trimtab.emulate.placement import Placement
from trimtab.emulate.throttling.cgroups import Group, create_quota
from trimtab.emulate.throttling.schedule import Contention
from trimtab.environment import logger
from trimtab.errors import TrimtabError

THROTTLES = ("auto", "quota", "duty", "competitor", "gemm")


class Throttle:
    """The mechanism of one job, with the control groups it created."""

    def __init__(
        self, job: Job, option: str, placements: Sequence[Placement], schedule: Sequence[Contention]
    ) -> None:
        self._contended = {contention.host for contention in schedule}
        self.groups: dict[int, Group] = {}
        slowed = [placement for placement in placements if self.slows(placement)]
        self.name = option if slowed else None
        if not slowed:
            return
        if option in ("auto", "quota"):
            try:
                self.groups = {placement.rank: create_quota(job, placement) for placement in slowed}
                self.name = "quota"
            except TrimtabError as error:
                if option == "quota":
                    raise TrimtabError(f"{error}, or use throttle duty, which needs no root") from None
                logger().info("falls back to duty cycles: quotas are not available (%s)", error)
                self.name = "duty"
        elif option == "competitor" and slowed[0].sharing > 1:
            raise TrimtabError(
                f"emulate: throttle competitor needs a core for each of the {len(placements)} ranks; "
                "use fewer ranks, or throttle quota or duty"
            )
        elif option == "gemm":
            self.groups = _core_parts(job, slowed)

    def slows(self, placement: Placement) -> bool:
        """Whether the rank ever runs slower than its cores; the part of a GPU is not set by a throttle."""
        own = placement.kind == "cpu" and (placement.speed < 1 or placement.sharing > 1)
        return own or placement.host in self._contended


def _core_parts(job: Job, slowed: Sequence[Placement]) -> dict[int, Group]:
    """Quotas that give ranks on one core equal parts of it: else one that waits would lend its part to the others.

    Emulated ranks are on devices of their own, where nobody gains from a neighbor that waits.
    """
    sharing = [placement for placement in slowed if placement.kind == "cpu" and placement.sharing > 1]
    try:
        return {placement.rank: create_quota(job, replace(placement, speed=1.0)) for placement in sharing}
    except TrimtabError as error:
        logger().info("ranks that share a core use what others leave: there are no quotas (%s)", error)
        return {}


def check_throttle(option: str, placements: Sequence[Placement], schedule: Sequence[Contention]) -> None:
    """Raise for unknown names, and for contention of GPUs with a throttle that cannot slow GPUs."""
    if option not in THROTTLES:
        raise TrimtabError(f"emulate: there is no throttle {option!r}; choose from {', '.join(THROTTLES)}")
    contended = {contention.host for contention in schedule}
    for placement in placements:
        if placement.kind == "cuda" and placement.host in contended and option != "gemm":
            raise TrimtabError(
                f"schedule: host {placement.host} has CUDA devices, whose part of the GPU is fixed at the start; "
                "use throttle gemm"
            )
