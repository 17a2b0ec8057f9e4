"""Which mechanism slows the CPU ranks down, and what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.emulate.throttling.quota import make_quota
from trimtab.environment import logger
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.emulate.job_directory import Job
    from trimtab.emulate.placement import Placement
    from trimtab.emulate.throttling.cgroups import Group
    from trimtab.emulate.throttling.schedule import Contention

THROTTLES = ("auto", "quota", "duty", "competitor", "gemm")


class Throttle:
    """The mechanism chosen for one job, with what it had to make."""

    def __init__(
        self, job: Job, asked: str, placements: Sequence[Placement], schedule: Sequence[Contention]
    ) -> None:
        self._contended = {contention.host for contention in schedule}
        self.groups: dict[int, Group] = {}
        slowed = [placement for placement in placements if self.slows(placement)]
        self.name = asked if slowed else None
        if not slowed:
            return
        if asked in ("auto", "quota"):
            try:
                self.groups = {placement.rank: make_quota(job, placement) for placement in slowed}
                self.name = "quota"
            except TrimtabError as error:
                if asked == "quota":
                    raise TrimtabError(f"{error}, or use throttle duty, which needs no root") from None
                logger().info("speeds by duty cycle, since there is no quota here (%s)", error)
                self.name = "duty"
        elif asked == "competitor" and slowed[0].sharing > 1:
            raise TrimtabError(
                f"emulate: throttle competitor needs a core for each of the {len(placements)} ranks; "
                "use fewer ranks, or throttle quota or duty"
            )

    def slows(self, placement: Placement) -> bool:
        """Whether the rank is ever to run slower than its cores do; a GPU's part is not given by a throttle."""
        own = placement.kind == "cpu" and (placement.speed < 1 or placement.sharing > 1)
        return own or placement.host in self._contended


def check_throttle(asked: str, placements: Sequence[Placement], schedule: Sequence[Contention]) -> None:
    """Refuse names that are not there, and contention of GPUs by what does not slow GPUs."""
    if asked not in THROTTLES:
        raise TrimtabError(f"emulate: there is no throttle {asked!r}; there are {', '.join(THROTTLES)}")
    contended = {contention.host for contention in schedule}
    for placement in placements:
        if placement.kind == "cuda" and placement.host in contended and asked != "gemm":
            raise TrimtabError(
                f"schedule: host {placement.host} has CUDA devices, whose part of the GPU is fixed at the start; "
                "use throttle gemm"
            )
